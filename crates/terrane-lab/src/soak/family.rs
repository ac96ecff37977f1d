//! Spaces that fork from each other: a tree in which every space goes its own way, and dies when chance will have it.
//!
//! A space belongs to a slot. Whoever locks the slot owns all its plots, so what each byte must be is known; other threads work on
//! its relatives meanwhile, which share pages with it.

use super::content::Generation;
use super::player::{Player, Scene};
use super::plot::{Kind, Page, Plot, READ_WRITE};
use super::world::{Count, Trouble};
use terrane::space::MapRequest;
use terrane::sync::Shared;
use terrane_hosted::Cpu;

/// What every space of a family has.
const PLOTS: [(Kind, usize); 4] =
    [(Kind::Anonymous, 0), (Kind::Block, 0), (Kind::PrivateFile, 0), (Kind::PrivateFile, 1)];

impl Player<'_> {
    /// Works for a while on a space of the families.
    pub fn play_family(&mut self, cpu: &mut Cpu, steps: usize) -> Result<(), Trouble> {
        let world = self.world;
        let index = self.below(world.families.len());
        let Some(mut slot) = world.families[index].try_lock() else { return Ok(()) };
        if slot.is_none() {
            *slot = self.first(cpu, index)?;
        }
        let Some(scene) = slot.as_mut() else { return Ok(()) };
        // The last space that ran here may be gone by now; its processor is told so late.
        cpu.switch_to(&scene.space);
        for _ in 0..steps {
            self.step(cpu, scene)?;
        }
        match self.below(8) {
            0..3 => {
                let other = self.below(world.families.len());
                // A slot that somebody works on stays as it is; so nobody waits in a circle.
                if let Some(mut child) = world.families[other].try_lock() {
                    *child = self.fork_family(cpu, scene, other)?;
                }
                self.check_some(cpu, scene, 2)?;
            }
            3 => {
                self.check_finally(cpu, scene)?;
                cpu.switch_off();
                self.note("end", scene.number, 0, 0, "");
                *slot = None;
            }
            4 => self.check_some(cpu, scene, 2)?,
            _ => {}
        }
        cpu.switch_off();
        Ok(())
    }

    /// A space that has no parent; `None` when memory is short.
    fn first(&mut self, cpu: &mut Cpu, index: usize) -> Result<Option<Scene>, Trouble> {
        let number = 100 + index;
        self.note("make a space", number, 0, 0, "");
        let Some(space) = self.world.space(self, cpu)? else { return Ok(None) };
        let mut scene = Scene { space, number, plots: Vec::new(), hot: Vec::new(), own: Generation::NONE };
        for (kind, of_kind) in PLOTS {
            let mut plot = Plot::fixed(kind, of_kind);
            let all = 0..plot.pages.len();
            let result = scene.space.map(cpu.core(), plot.request(self.world, &all, READ_WRITE));
            if self.unless_short("map", &plot, result)?.is_some() {
                plot.pages.fill(Page::mapped(READ_WRITE));
            }
            scene.plots.push(plot);
        }
        let counters: MapRequest<_> = self.world.counters_request();
        let result = scene.space.map(cpu.core(), counters);
        Ok(self.unless_short("map", &"the counters", result)?.map(|_| scene))
    }

    fn fork_family(&mut self, cpu: &mut Cpu, scene: &Scene, index: usize) -> Result<Option<Scene>, Trouble> {
        self.note("fork", scene.number, 0, 0, "into a family");
        let result = scene.space.fork(cpu.core());
        let Some(child) = self.unless_short("fork", &"the space", result)? else { return Ok(None) };
        self.world.count(Count::Fork);
        let Ok(child) = Shared::try_new(child) else { return Ok(None) };
        Ok(Some(scene.fork(child, 100 + index)))
    }
}
