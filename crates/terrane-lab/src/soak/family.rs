//! Forks: of the space that all threads share, and of spaces that fork from each other, a tree in which every space goes its own
//! way, and dies when chance will have it.
//!
//! A space of the tree belongs to a slot. Whoever locks the slot owns all its plots, so what each byte must be is known; other threads work on
//! its relatives meanwhile, which share pages with it.

use super::content::Generation;
use super::player::{Player, Scene};
use super::plot::{Kind, Page, Plot, READ_WRITE};
use super::race::HOT_PAGES;
use super::world::{Count, Trouble};
use terrane::PAGE_SIZE;
use terrane::space::MapRequest;
use terrane::sync::Shared;
use terrane_hosted::Cpu;

/// What every space of a family has.
const PLOTS: [(Kind, usize); 4] =
    [(Kind::Anonymous, 0), (Kind::Block, 0), (Kind::PrivateFile, 0), (Kind::PrivateFile, 1)];

impl Player<'_> {
    /// Forks, checks that the child is a copy, and plays on both sides in turn.
    pub fn fork(&mut self, cpu: &mut Cpu, scene: &mut Scene, depth: usize) -> Result<(), Trouble> {
        self.note("fork", scene.number, 0, 0, "");
        let result = scene.space.fork(cpu.core());
        let Some(child) = self.unless_short("fork", &"the space", result)? else { return Ok(()) };
        self.world.count(Count::Fork);
        let Ok(child) = Shared::try_new(child) else { return Ok(()) };
        let mut child = scene.fork(child, scene.number + 1);
        cpu.switch_to(&child.space);
        // Nobody but this thread runs the child, so what others had stored stands still there.
        let mut seen = self.others_hot(cpu)?;
        seen.extend(self.foreign_words(cpu));
        for page in 0..HOT_PAGES {
            self.check_hot(cpu, &child, page)?;
        }
        self.check_own(cpu, &child)?;
        for _ in 0..1 + self.below(3) {
            cpu.switch_to(&child.space);
            self.check_some(cpu, &child, 2)?;
            for _ in 0..20 {
                self.step(cpu, &mut child)?;
            }
            if depth > 0 && self.one_in(3) {
                self.fork(cpu, &mut child, depth - 1)?;
            }
            cpu.switch_to(&scene.space);
            for _ in 0..20 {
                self.step(cpu, scene)?;
            }
            self.check_some(cpu, scene, 4)?;
        }
        cpu.switch_to(&child.space);
        for (at, value) in seen {
            match cpu.load_u64(at) {
                Ok(now) if now != value => {
                    return Err(Trouble(format!(
                        "at {at:#x} of a child there was {value:#018x}, and then {now:#018x}"
                    )));
                }
                _ => {}
            }
        }
        cpu.switch_to(&scene.space);
        Ok(())
    }

    /// Words in private pages of other threads: all of some pages.
    fn foreign_words(&mut self, cpu: &mut Cpu) -> Vec<(u64, u64)> {
        let mut seen = Vec::new();
        for _ in 0..4 {
            let kind = [Kind::Anonymous, Kind::Block, Kind::PrivateFile][self.below(3)];
            let number = self.below(kind.plots() * self.world.threads);
            if number % self.world.threads != self.thread {
                let page = self.below(kind.pages());
                let start = Plot::fixed(kind, number).address(page);
                let words = (start..start + PAGE_SIZE).step_by(8);
                seen.extend(words.map_while(|at| cpu.load_u64(at).ok().map(|value| (at, value))));
            }
        }
        seen
    }

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
