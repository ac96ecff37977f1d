//! Sealed mappings, and spaces that begin anew. The answers are Linux 6.18's.

use super::{Bench, Space};
use crate::addr::PAGE_SIZE as P;
use crate::error::{Error, FaultError};
use crate::host::Host;
use crate::page_table::Format;
use crate::space::{Limit, MapRequest, Program, SpaceConfig};
use crate::testing::TestHost;
use crate::vma::{Prot, RemapFlags, VmFlags};

const RW: Prot = Prot::READ.union(Prot::WRITE);
const BASE: u64 = 0x1000_0000;
const FIXED: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);

fn sealed(bench: &Bench, space: &Space) -> (usize, u64) {
    let found = space.mappings(&bench.cpu).unwrap();
    let sealed = found.iter().filter(|mapping| mapping.flags.contains(VmFlags::SEALED));
    (found.len(), sealed.map(|mapping| mapping.range.pages()).sum())
}

#[test]
fn sealed_mappings_stay() {
    let bench = Bench::new(600);
    let (space, cpu) = (bench.space(SpaceConfig::default()), &bench.cpu);
    let page = |n: u64| BASE + n * P;
    space.map(cpu, MapRequest::anonymous(8 * P, RW).fixed(BASE)).unwrap();
    bench.store(&space, page(3), 3).unwrap();
    assert_eq!(space.mseal(cpu, page(0), P, 1), Err(Error::Invalid));
    assert_eq!(space.mseal(cpu, page(0) + 1, P, 0), Err(Error::Invalid));
    assert_eq!(space.mseal(cpu, page(0), u64::MAX, 0), Err(Error::Invalid));
    assert_eq!(space.mseal(cpu, page(0), 0u64.wrapping_sub(P), 0), Err(Error::Invalid));
    assert_eq!(space.mseal(cpu, page(40), 0, 0), Ok(()));
    assert_eq!(space.mseal(cpu, page(4), 5 * P, 0), Err(Error::NoMemory));
    assert_eq!(sealed(&bench, &space), (1, 0));
    assert_eq!(space.mseal(cpu, page(2), 2 * P - 1, 0), Ok(()));
    assert_eq!(sealed(&bench, &space), (3, 2));
    let no = Err(Error::NotPermitted);
    // Not even in part, and nothing else of the range.
    for (from, to) in [(0, 8), (2, 4), (3, 4), (1, 3), (3, 8)] {
        assert_eq!(space.unmap(cpu, page(from), (to - from) * P), no);
        let request = MapRequest::anonymous((to - from) * P, RW).fixed(page(from));
        assert_eq!(space.map(cpu, request), Err(Error::NotPermitted));
    }
    assert_eq!(space.protect(cpu, page(2), P, Prot::READ), no);
    assert_eq!(space.protect(cpu, page(2), P, RW), no);
    let remap = |from, old, new, flags, to| space.remap(cpu, page(from), old * P, new * P, flags, page(to));
    let refused = Err(Error::NotPermitted);
    assert_eq!(remap(2, 2, 2, FIXED, 20), refused);
    assert_eq!(remap(2, 2, 1, RemapFlags::empty(), 0), refused);
    assert_eq!(remap(2, 2, 2, RemapFlags::empty(), 0), refused);
    assert_eq!(remap(0, 8, 1, RemapFlags::empty(), 0), refused, "cuts it off");
    assert_eq!(remap(6, 2, 2, FIXED, 1), refused, "in its place");
    // As in Linux, what a refused call has divided stays so, until one of the two changes.
    assert_eq!(sealed(&bench, &space), (4, 2));
    // What lies before it is given the new protection.
    assert_eq!(space.protect(cpu, page(0), 8 * P, Prot::READ), no);
    assert_eq!(sealed(&bench, &space), (3, 2));
    assert_eq!(bench.store(&space, page(0), 1), Err(FaultError::NotAllowed));
    assert_eq!((bench.store(&space, page(3), 4), bench.store(&space, page(5), 1)), (Ok(()), Ok(())));
    // A child has it too. What is sealed in one go is one mapping.
    let child = space.fork(cpu).unwrap();
    assert_eq!(child.unmap(cpu, page(2), P), no);
    space.unmap(cpu, page(0), 2 * P).unwrap();
    assert_eq!(space.mseal(cpu, page(2), 6 * P, 0), Ok(()));
    assert_eq!(sealed(&bench, &space), (1, 6));
    // The heap.
    space.set_heap(cpu, 0x200_0000).unwrap();
    space.brk(cpu, 0x200_0000 + 4 * P);
    space.mseal(cpu, 0x200_0000 + 2 * P, P, 0).unwrap();
    assert_eq!(space.brk(cpu, 0x200_0000 + P), 0x200_0000 + 4 * P);
    assert_eq!(space.brk(cpu, 0x200_0000 + 3 * P), 0x200_0000 + 3 * P);
    // Nothing lasts for ever.
    space.exec(cpu);
    assert_eq!((sealed(&bench, &space), space.heap().end), ((0, 0), 0));
    assert_eq!((space.mapped_bytes(), space.data_bytes()), (0, 0));
    space.map(cpu, MapRequest::anonymous(P, RW).fixed(page(2))).unwrap();
    assert_eq!(bench.load(&space, page(2)), Ok(0));
    space.unmap(cpu, page(2), P).unwrap();
    drop((space, child));
    bench.assert_nothing_left();
}

#[test]
fn programs_begin_as_linux_begins_them() {
    let bench = Bench::new(600);
    let cpu = &bench.cpu;
    let top = <<TestHost as Host>::Format as Format>::USER_END;
    let config = SpaceConfig::for_program::<<TestHost as Host>::Format>(Some(8 << 20));
    assert_eq!(config.map_top, top - (128 << 20));
    let wide = SpaceConfig::for_program::<<TestHost as Host>::Format>(Some(1 << 30));
    assert_eq!(wide.map_top, top - (1 << 30) - (1 << 20));
    assert!(SpaceConfig::for_program::<<TestHost as Host>::Format>(None).map_top > top / 7);
    let space = bench.space(config);
    let program = Program { stack_bytes: 100, heap: 0x200_0000, ..Program::default() };
    let stack = space.start_program(cpu, &program).unwrap();
    assert_eq!((stack.end, stack.len()), (top, 132 << 10));
    // It grows as far as the limit, and a page less than nothing more.
    bench.store(&space, top - 8, 1).unwrap();
    bench.store(&space, top - (8 << 20), 1).unwrap();
    assert_eq!(bench.store(&space, top - (8 << 20) - 8, 1), Err(FaultError::NotMapped));
    let listed = space.mappings(cpu).unwrap();
    assert_eq!((listed.len(), listed[0].range), (1, crate::addr::AddrRange::new(top - (8 << 20), top)));
    // Mappings lie below all that it may take.
    let at = space.map(cpu, MapRequest::anonymous(P, RW)).unwrap();
    assert_eq!(at, config.map_top - P);
    assert_eq!(space.brk(cpu, 0x200_0000 + P), 0x200_0000 + P);
    assert_eq!(space.layout().stack, top - 1);
    // Twice is not possible before the space is emptied; what cannot be leaves nothing.
    assert_eq!(space.start_program(cpu, &program), Err(Error::Exists));
    space.exec(cpu);
    let too_much = Program { stack_bytes: 9 << 20, ..program };
    assert_eq!(space.start_program(cpu, &too_much), Err(Error::NoMemory));
    let unaligned = Program { stack_top: top - 1, ..program };
    assert_eq!(space.start_program(cpu, &unaligned), Err(Error::Invalid));
    let no_heap = Program { heap: top + 1, ..program };
    assert!(space.start_program(cpu, &no_heap).is_err());
    assert_eq!(space.mapped_bytes(), 0);
    let low = Program { stack_top: 0x4000_0000, stack_bytes: 40 * P, executable_stack: true, ..program };
    let stack = space.start_program(cpu, &low).unwrap();
    assert_eq!((stack.end, stack.len()), (0x4000_0000, (40 + 32) * P));
    assert!(space.mappings(cpu).unwrap()[0].prot.contains(Prot::EXEC));
    // A limit below what is usual.
    space.exec(cpu);
    space.set_limit(Limit::Stack, Some(10 * P));
    assert_eq!(space.start_program(cpu, &program).unwrap().len(), 10 * P);
    drop(space);
    bench.assert_nothing_left();
}

#[test]
fn sealed_memory_that_is_read_only_keeps_its_content() {
    let bench = Bench::new(600);
    let (space, cpu) = (bench.space(SpaceConfig::default()), &bench.cpu);
    space.map(cpu, MapRequest::anonymous(4 * P, RW).fixed(BASE)).unwrap();
    bench.store(&space, BASE + P, 3).unwrap();
    space.protect(cpu, BASE, 2 * P, Prot::READ).unwrap();
    space.mseal(cpu, BASE, 4 * P, 0).unwrap();
    let discards = [4, 8, 9, 10, 18, 24, 102];
    for number in discards {
        assert_eq!(space.madvise(cpu, BASE + P, P, number), Err(Error::NotPermitted), "{number}");
    }
    assert_eq!((bench.load(&space, BASE + P), sealed(&bench, &space)), (Ok(3), (2, 4)));
    // Other advice is followed; and what may be stored to may be emptied.
    space.madvise(cpu, BASE, P, 16).unwrap();
    bench.store(&space, BASE + 3 * P, 3).unwrap();
    space.madvise(cpu, BASE + 2 * P, 2 * P, 4).unwrap();
    assert_eq!(bench.load(&space, BASE + 3 * P), Ok(0));
    drop(space);
    bench.assert_nothing_left();
}
