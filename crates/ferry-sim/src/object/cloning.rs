//! Owners make clones, read them, and try to delete their pins.
//!
//! A clone is there as a whole or not at all, at whatever request its maker crashes. It holds what
//! its snapshot had, whatever becomes of the volume.

use super::clones::{Expected, is_pin, name};
use super::executor::SimExecutor;
use super::history::BLOCKS;
use super::objects::CLONES;
use super::run::{Life, Run, value};
use super::store::Faults;
use super::stored;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_object::{Claimant, CloneName, ObjectDevice, ObjectError, Store};
use std::sync::Arc;

/// Pins of clones that the volume has, at most.
const PINS_MAX: usize = 4;

impl Run {
    fn clone_store(&self, owner: usize, faults: Faults, number: usize) -> Arc<dyn Store> {
        self.store(owner, faults).beside(&name(number)).expect("it may have any name")
    }

    /// Opens a clone, reads it, and writes to it, if `writes`.
    fn look_at_clone(
        &self,
        owner: usize,
        faults: Faults,
        executor: &Arc<SimExecutor>,
        number: usize,
        writes: bool,
    ) {
        let store = self.clone_store(owner, faults, number);
        let passphrase = stored::passphrase(self.plan.seed);
        let claimant = Claimant { take_over: true, passphrase, ..Claimant::default() };
        let (limits, env) = (self.plan.limits, self.env());
        let executor = executor.clone();
        let (image, certain) = {
            let clones = self.clones.lock();
            (clones.all[number].image, clones.all[number].certain)
        };
        let opened = match writes {
            true => ObjectDevice::open(store, executor, &claimant, limits, &env),
            false => ObjectDevice::open_read_only(store, executor, &claimant, limits, &env),
        };
        let device = match opened {
            Err(ObjectError::NoVolume) if !certain => return,
            // A list may lag for longer than a reader looks for a root.
            Err(ObjectError::Damaged { what, .. })
                if !writes
                    && (what.starts_with("no root") || what.starts_with("the volume is enc")) =>
            {
                return;
            }
            Err(error) => {
                return self
                    .fail(format!("owner {owner}: clone {number} cannot be opened: {error}"));
            }
            Ok(device) => device,
        };
        let mut buf = AlignedBuf::zeroed(BLOCKS * BLOCK_SIZE);
        if let Err(error) = device.read(0, &mut buf) {
            return self.fail(format!("owner {owner}: clone {number} cannot be read: {error}"));
        }
        let found: Vec<u64> = buf.chunks_exact(BLOCK_SIZE).map(value).collect();
        if found != image {
            self.fail(format!("clone {number} holds {found:?} and not {image:?}"));
        }
        self.clones.lock().reads += 1;
        if writes {
            buf[..BLOCK_SIZE].fill(0xee);
            let mut again = AlignedBuf::zeroed(BLOCKS * BLOCK_SIZE);
            let written = device.write(0, &buf).and_then(|()| device.flush());
            let written = written.and_then(|()| device.read(0, &mut again));
            if written.is_err() || *again != *buf {
                self.fail(format!("clone {number} cannot be written: {written:?}"));
            }
        }
    }

    /// At the end: each clone is read and written. Its pin cannot be deleted while it is there, and
    /// then it can.
    pub fn end_clones(
        &self,
        owner: usize,
        device: &Arc<ObjectDevice>,
        executor: &Arc<SimExecutor>,
    ) {
        let count = self.clones.lock().all.len();
        for number in 0..count {
            self.look_at_clone(owner, self.quiet(), executor, number, true);
            let pins = device.snapshots().into_iter().map(|found| found.name);
            let of_it =
                |pin: &String| CloneName::parse(pin).is_some_and(|pin| pin.clone == name(number));
            let certain = self.clones.lock().all[number].certain;
            let pin = pins.into_iter().find(of_it);
            if let (Some(pin), true) = (&pin, certain) {
                match device.delete_snapshot(pin) {
                    Err(ObjectError::NeededByClone(_)) => {}
                    deleted => self.fail(format!("the pin {pin} is deleted: {deleted:?}")),
                }
            }
            self.world(|world| world.objects.remove(&format!("{}/", name(number))));
            if let Some(Err(error)) = pin.map(|pin| device.delete_snapshot(&pin)) {
                self.fail(format!("the pin of clone {number} cannot be deleted: {error}"));
            }
        }
    }
}

impl Life<'_> {
    /// Makes or reads a clone, or tries to delete a pin.
    pub fn clones(&mut self) {
        let run = self.run;
        let (pins, snapshots): (Vec<_>, Vec<_>) =
            self.device.snapshots().into_iter().partition(|found| is_pin(&found.name));
        let below = |len: usize| run.below(len.max(1) as u64) as usize;
        match run.below(3) {
            0 if pins.len() < PINS_MAX => {
                if let Some(drawn) = snapshots.get(below(snapshots.len())) {
                    self.make_clone(&drawn.name);
                }
            }
            1 => {
                if let Some(pin) = pins.get(below(pins.len())) {
                    self.delete_pin(&pin.name);
                }
            }
            _ => {
                let count = run.clones.lock().all.len();
                if count > 0 {
                    let number = below(count);
                    run.look_at_clone(self.owner, run.plan.faults, self.executor, number, false);
                }
            }
        }
    }

    fn make_clone(&self, snapshot: &str) {
        let run = self.run;
        let image = run.snapshots.lock().image(snapshot);
        let number = {
            let mut clones = run.clones.lock();
            clones.all.push(Expected { image, certain: false });
            clones.all.len() - 1
        };
        if run.below(2) == 0 {
            // At one of its requests, or soon after.
            let crash_in = Some(run.below(40));
            run.world(|world| world.crash_in[self.owner] = crash_in);
        }
        let store: Arc<dyn Store> = run.store(self.owner, run.plan.faults);
        let made = ObjectDevice::make_clone(
            (store, self.executor.clone()),
            (snapshot, &name(number)),
            stored::passphrase(run.plan.seed).as_ref(),
            run.plan.limits.patience,
            &run.env(),
            |pin| self.device.create_snapshot(pin),
        );
        let made = made.map_err(|error| match error {
            ObjectError::PinLeft { error, .. } => *error,
            error => error,
        });
        match made {
            Ok(_) => run.clones.lock().all[number].certain = true,
            Err(_) if self.device.failure().is_some() || run.is_claimed_beyond(self.epoch) => {}
            Err(ObjectError::Damaged { what, .. })
                if what.starts_with("no root") || what.starts_with("the volume is enc") => {}
            Err(error) => {
                run.fail(format!("owner {}: no clone of {snapshot}: {error}", self.owner));
            }
        }
    }

    fn delete_pin(&self, pin: &str) {
        let run = self.run;
        let certain = CloneName::parse(pin).is_some_and(|pin| {
            let number = pin.clone.strip_prefix(CLONES).and_then(|number| number.parse().ok());
            number.is_some_and(|number: usize| run.clones.lock().all[number].certain)
        });
        match self.device.delete_snapshot(pin) {
            Ok(()) if certain => {
                run.fail(format!("the pin {pin} is deleted, and its clone is there"))
            }
            _ => {}
        }
    }
}
