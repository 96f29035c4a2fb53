//! A life in which callers do not wait for each other.

use super::Life;
use crate::history::History;
use crate::model::{Effects, Model, Outcome};
use crate::ops::Op;
use crate::overlap::{Overlap, Step, judge};
use crate::world::{Trouble, World};
use ferry_fs::Ino;
use std::time::Duration;

impl Life<'_> {
    /// One operation beside those that are under way.
    pub(super) fn step_overlapping(
        &mut self,
        overlap: &mut Overlap,
        world: &mut World,
        history: &mut History,
        model: &mut Model,
        op: &Op,
        n: usize,
    ) -> Result<Step, String> {
        let faulty = self.plan.fault.is_some();
        // Slower than requests come, until so many wait that it has to catch up.
        for _ in 0..overlap.rng.below(8).saturating_sub(4) {
            if let Step::DeviceFailed = judge(overlap.complete_one(world, history), faulty)? {
                return Ok(Step::DeviceFailed);
            }
        }
        let waits = match op {
            Op::Sync | Op::Trim | Op::Release(_) => true,
            Op::Tick(_) => overlap.rng.chance(1, 4) || !world.collecting(),
            _ => false,
        };
        let prompt = waits || overlap.is_full() || !world.roomy();
        if prompt && let Step::DeviceFailed = judge(overlap.catch_up(world, history), faulty)? {
            return Ok(Step::DeviceFailed);
        }
        let target = model.synced_by(op);
        let step = match (target, model.outcome(op)) {
            (Some(ino), Outcome::Done) => {
                self.ask_overlapping(overlap, world, history, model, op, ino)?
            }
            // Time seals what is collected, but the device has not caught up: nothing is
            // guaranteed.
            (None, _) if matches!(op, Op::Tick(_)) && !prompt => {
                self.tick_overlapping(overlap, world, history, model, op)?
            }
            _ => {
                let device = overlap.device.clone();
                self.step(world, history, model, op, n, &*device)?
            }
        };
        if prompt {
            overlap.resume();
        }
        Ok(step)
    }

    fn ask_overlapping(
        &mut self,
        overlap: &mut Overlap,
        world: &World,
        history: &mut History,
        model: &Model,
        op: &Op,
        ino: Ino,
    ) -> Result<Step, String> {
        self.tally.ops += 1;
        world.clock.advance(Duration::from_millis(1));
        history.ended(model.tree(), Effects::default(), overlap.device.trace_len());
        let guarantee = history.guarantee(ino, &model.above(ino));
        match overlap.ask(world, op, guarantee) {
            Ok(Some(guarantee)) => history.answered(guarantee, overlap.device.trace_len()),
            Ok(None) => self.tally.overlapped += 1,
            Err(trouble) => return judge(Err(trouble), self.plan.fault.is_some()),
        }
        Ok(Step::Done)
    }

    fn tick_overlapping(
        &mut self,
        overlap: &Overlap,
        world: &World,
        history: &mut History,
        model: &Model,
        op: &Op,
    ) -> Result<Step, String> {
        let Op::Tick(ms) = op else { unreachable!("only time passes here") };
        self.tally.ops += 1;
        world.clock.advance(Duration::from_millis(u64::from(*ms)));
        let ticked = world.fs.tick().map_err(|error| Trouble::Errno(error.errno().0));
        history.ended(model.tree(), Effects::default(), overlap.device.trace_len());
        judge(ticked, self.plan.fault.is_some())
    }
}
