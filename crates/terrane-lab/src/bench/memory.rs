//! What mappings and frames cost in memory.

use super::rig::{self, Rig};
use crate::failure::Failure;
use crate::measure::random::Random;
use crate::measure::{Case, Plan, Sample};
use crate::report::Role;
use terrane::PAGE_SIZE;
use terrane::space::{MapRequest, SpaceConfig};
use terrane::vma::Prot;

/// How many mappings are made.
const MAPPINGS: u64 = 64 << 10;

/// The order in which mappings come.
#[derive(Clone, Copy)]
enum Order {
    /// Each below the last, as a space places them by itself.
    Downwards,
    /// Each above the last.
    Upwards,
    /// Anywhere.
    Random,
}

/// Plans the cases. Their samples are all alike: memory is counted, not timed.
pub fn plan(plan: &mut Plan<'static>) {
    for (order, words) in [
        (Order::Downwards, "Terrane, mapped downwards"),
        (Order::Upwards, "Terrane, mapped upwards"),
        (Order::Random, "Terrane, mapped in random order"),
    ] {
        let metric = "memory of a mapping, record and index";
        plan.case(Case::new(Role::Terrane, words, 1, metric, "bytes", move || {
            let bytes = of_mapping(order)?;
            Ok(move |_| Ok(Sample::from(bytes)))
        }));
    }
    plan.case(Case::new(Role::Terrane, "Terrane", 1, "memory of a frame's metadata", "bytes", || {
        let bytes = of_frame()?;
        Ok(move |_| Ok(Sample::from(bytes)))
    }));
}

/// Bytes that a mapping takes, in a space of [`MAPPINGS`].
fn of_mapping(order: Order) -> Result<f64, Failure> {
    let rig = Rig::new(16 << 20, 1, SpaceConfig::default())?;
    let mut places: Vec<u64> = (0..MAPPINGS).collect();
    match order {
        Order::Upwards => {}
        Order::Downwards => places.reverse(),
        Order::Random => {
            let mut random = Random::new(3);
            for last in (1..places.len()).rev() {
                places.swap(last, (random.next() >> 16) as usize % (last + 1));
            }
        }
    }
    for place in places {
        // A hole behind each, so that they never merge.
        let start = (1 << 32) + place * 2 * PAGE_SIZE;
        rig.map(MapRequest::anonymous(PAGE_SIZE, Prot::READ).fixed(start))?;
    }
    let bytes = rig.machine.machine().usage().vma_bytes + rig.space.index_bytes();
    Ok(bytes as f64 / rig.space.map_count() as f64)
}

/// Bytes of metadata that a frame takes.
fn of_frame() -> Result<f64, Failure> {
    let machine = rig::machine(1 << 20, 1)?;
    Ok(machine.machine().usage().bytes_per_frame as f64)
}
