//! From QEMU's jump into the kernel to the first Rust function.
//!
//! QEMU's `-kernel` loads a 64-bit ELF that carries a PVH note, and jumps to the address in the note in 32-bit mode with
//! paging off; `ebx` holds the address of the start info ([`StartInfo`]). From there it is some twenty instructions: fill in
//! the page tables (the low 4 GiB, by 2 MiB, at three addresses: 0 for the next instruction, the direct map, and the upper
//! half for the kernel), turn on SSE, long mode and paging, and jump up.
//!
//! Source: Xen's `docs/misc/pvh.pandoc` for the entry state; Intel SDM volume 3A, section 10.8.5 for the way to long mode.

use crate::mm::direct;
use core::arch::global_asm;
use core::ffi::CStr;

global_asm!(
    r#"
    .pushsection .note.Xen, "a", @note
    .balign 4
    .long 4, 4, 18              # sizes of name and value; XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long pvh_start
    .popsection

    .pushsection .boot.tables, "aw", @progbits
    .balign 4096
    .global boot_pml4
boot_pml4:
    .skip 4096
    .global boot_pdpt_low
boot_pdpt_low:
    .skip 4096
boot_pdpt_high:
    .skip 4096
boot_pd:
    .skip 4 * 4096
    .global boot_gdt
boot_gdt:
    .quad 0
    .quad 0x00af9b000000ffff    # 0x08: code, 64 bit
    .quad 0x00cf93000000ffff    # 0x10: data
    .quad 0x00cf9b000000ffff    # 0x18: code, 32 bit
    .global boot_gdt_pointer
boot_gdt_pointer:
    .word boot_gdt_pointer - boot_gdt - 1
    .quad boot_gdt
    .popsection

    .pushsection .boot.text, "ax", @progbits
    .code32
    .global pvh_start
pvh_start:
    cli
    cld
    movl $boot_pd, %edi         # 4 GiB by 2 MiB: present, writable, large, global
    movl $0x183, %eax
    movl $2048, %ecx
1:  movl %eax, (%edi)
    movl $0, 4(%edi)
    addl $8, %edi
    addl $0x200000, %eax
    decl %ecx
    jnz 1b

    movl $boot_pd + 3, %eax
    movl $boot_pdpt_low, %edi
    movl $4, %ecx
2:  movl %eax, (%edi)
    addl $8, %edi
    addl $4096, %eax
    decl %ecx
    jnz 2b
    movl $boot_pd + 3, boot_pdpt_high + 510 * 8
    movl $boot_pdpt_low + 3, boot_pml4
    movl $boot_pdpt_low + 3, boot_pml4 + 256 * 8
    movl $boot_pdpt_high + 3, boot_pml4 + 511 * 8

    .global long_mode
    # Also from the trampoline of the other processors, with 1 in ebp.
    movl $0, %ebp
long_mode:
    movl %cr4, %eax
    orl $0x6a0, %eax            # PAE, PGE, OSFXSR, OSXMMEXCPT
    movl %eax, %cr4
    movl $boot_pml4, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx      # EFER: SCE, LME, NXE
    rdmsr
    orl $0x901, %eax
    wrmsr
    movl $0x80010033, %eax      # PG, WP, NE, ET, MP, PE
    movl %eax, %cr0
    lgdt boot_gdt_pointer
    ljmp $0x08, $3f
    .code64
3:  movl $0x10, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    xorl %eax, %eax
    movl %eax, %fs
    movl %eax, %gs
    testl %ebp, %ebp
    jnz 4f
    movabsq $boot_stack_top, %rsp
    xorl %ebp, %ebp
    movl %ebx, %edi
    movabsq $start_first, %rax
    pushq $0
    jmp *%rax
4:  movabsq $next_stack, %rax
    movq (%rax), %rsp
    xorl %ebp, %ebp
    movabsq $start_next, %rax
    pushq $0
    jmp *%rax
    .popsection

    .pushsection .bss.boot_stack, "aw", @nobits
    .balign 4096
boot_stack:
    .skip 262144
boot_stack_top:
    .popsection
"#,
    options(att_syntax)
);

/// What the loader says about the machine: `struct hvm_start_info` of Xen's public headers. Addresses are physical.
#[repr(C)]
pub struct StartInfo {
    magic: u32,
    version: u32,
    _flags: u32,
    module_count: u32,
    modules: u64,
    command_line: u64,
    rsdp: u64,
    memory_map: u64,
    memory_map_count: u32,
    _reserved: u32,
}

#[repr(C)]
struct Module {
    start: u64,
    len: u64,
    _command_line: u64,
    _reserved: u64,
}

#[repr(C)]
struct MemoryMapEntry {
    start: u64,
    len: u64,
    kind: u32,
    _reserved: u32,
}

const MAGIC: u32 = 0x336e_c578;
const RAM: u32 = 1;

impl StartInfo {
    /// True when it is what it should be.
    pub fn is_valid(&self) -> bool {
        self.magic == MAGIC && self.version >= 1
    }

    /// Where the firmware's tables begin.
    pub fn rsdp(&self) -> u64 {
        self.rsdp
    }

    /// The command line; empty if it is not text.
    pub fn command_line(&self) -> &'static str {
        if self.command_line == 0 {
            return "";
        }
        // SAFETY: the loader put a string there, below 1 MiB, where the kernel changes nothing.
        unsafe { CStr::from_ptr(direct(self.command_line).cast()) }.to_str().unwrap_or("")
    }

    /// Start and length of the pieces of RAM.
    pub fn ram(&self) -> impl Iterator<Item = (u64, u64)> {
        let entries = direct(self.memory_map).cast::<MemoryMapEntry>();
        (0..self.memory_map_count as usize).filter_map(move |index| {
            // SAFETY: the loader put so many entries there, below 1 MiB.
            let entry = unsafe { &*entries.add(index) };
            (entry.kind == RAM).then_some((entry.start, entry.len))
        })
    }

    /// Where the archive is that QEMU's `-initrd` names, and its length.
    pub fn archive(&self) -> Option<(u64, u64)> {
        if self.module_count == 0 {
            return None;
        }
        // SAFETY: the loader put a module there, below 1 MiB.
        let module = unsafe { &*direct(self.modules).cast::<Module>() };
        Some((module.start, module.len))
    }

    /// Its bytes.
    pub fn archive_bytes(&self) -> &'static [u8] {
        // SAFETY: the memory map leaves it out, so nobody writes it.
        self.archive()
            .map_or(&[], |(start, len)| unsafe { core::slice::from_raw_parts(direct(start), len as usize) })
    }
}

unsafe extern "C" {
    #[link_name = "kernel_end"]
    static KERNEL_END: u8;
}

/// The physical address behind the kernel.
pub fn kernel_end() -> u64 {
    // SAFETY: only the address is taken.
    (&raw const KERNEL_END) as u64 - 0xffff_ffff_8000_0000
}

/// The first Rust function, on the first processor: interrupts off, the first 4 GiB mapped.
#[unsafe(no_mangle)]
extern "C" fn start_first(info: u64) -> ! {
    // SAFETY: the loader put it there, below 1 MiB, where the kernel changes nothing.
    super::start(unsafe { &*direct(info).cast() })
}
