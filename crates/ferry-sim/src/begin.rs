//! What a run begins on: a device with an empty volume, over whatever was there before, or a copy
//! of a prepared one.

use crate::crash::Life;
use crate::device::{SimDevice, SimRng, sim_env};
use crate::model::Model;
use crate::ops::Op;
use crate::plan::{Failure, Plan, Tally};
use ferry_device::BlockDevice;
use ferry_fs::Ino;
use ferry_fs::volume::{MkfsOptions, mkfs};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// What a run begins on.
#[derive(Clone, Debug)]
pub enum Begin {
    /// An empty volume on a device of zeros.
    Blank,
    /// An empty volume on a device full of random bytes.
    Scribbled,
    /// An empty volume made, by force, over one with a life behind it: its log, its home store, its
    /// data lie below.
    Over {
        /// What was done in that life.
        ops: Vec<Op>,
        /// That volume had the same id: only what is written over tells the two apart.
        same_id: bool,
    },
    /// A copy of a volume that holds something already.
    Prepared(Arc<Prepared>),
}

impl Begin {
    /// For people.
    pub fn describe(&self) -> String {
        match self {
            Begin::Blank => "a device of zeros".into(),
            Begin::Scribbled => "a device of random bytes".into(),
            Begin::Over { ops, same_id } => {
                let id = if *same_id { "the same id" } else { "another id" };
                format!("a device with an older volume of {id}, after {} operations", ops.len())
            }
            Begin::Prepared(_) => "a prepared volume".into(),
        }
    }
}

/// A volume that was made, filled and closed once, to be copied for many runs.
pub struct Prepared {
    device: SimDevice,
    model: Model,
    seen: HashSet<Ino>,
}

impl Prepared {
    /// What it holds.
    pub fn model(&self) -> &Model {
        &self.model
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Prepared")
    }
}

/// Where a life starts.
pub(crate) struct Start {
    pub device: Arc<SimDevice>,
    pub model: Model,
    /// Inode numbers that programs were told before.
    pub seen: HashSet<Ino>,
}

/// Marks the seed of the life before the first.
const EARLIER: u64 = 0x0065_6172_6c69_6572;

impl Plan {
    /// Runs the plan's first life without a crash and keeps what it leaves, closed.
    pub fn prepare(&self) -> Result<Prepared, Failure> {
        let mut start = self.begin()?;
        let mut tally = Tally::default();
        let ops = self.lives.first().map_or(&[][..], |ops| ops);
        let mut life = Life::new(self, 0, start.seen, &mut tally);
        let history = life.live(&start.device, &mut start.model, ops)?;
        let seen = history.seen_by(usize::MAX).collect();
        start.device.restart_trace();
        Ok(Prepared { device: start.device.copy(), model: start.model, seen })
    }

    /// The device and the state that the first life starts from.
    pub(crate) fn begin(&self) -> Result<Start, Failure> {
        if let Begin::Prepared(prepared) = &self.begin {
            let Prepared { device, model, seen } = &**prepared;
            return Ok(Start {
                device: Arc::new(device.copy()),
                model: model.clone(),
                seen: seen.clone(),
            });
        }
        let device = Arc::new(SimDevice::new(self.volume_bytes));
        match &self.begin {
            Begin::Blank | Begin::Prepared(_) => {}
            Begin::Scribbled => {
                device.scribble(0, self.volume_bytes, &mut SimRng::new(self.seed));
            }
            Begin::Over { ops, same_id } => {
                let earlier = Plan {
                    seed: self.seed ^ EARLIER,
                    begin: Begin::Blank,
                    lives: vec![ops.clone()],
                    flush_lies: false,
                    fault: None,
                    under_way: None,
                    ..self.clone()
                };
                self.make_volume(&device, if *same_id { self.seed } else { earlier.seed })?;
                let mut tally = Tally::default();
                Life::new(&earlier, 0, HashSet::new(), &mut tally).live(
                    &device,
                    &mut Model::empty(),
                    &earlier.lives[0],
                )?;
            }
        }
        self.make_volume(&device, self.seed)?;
        device.restart_trace();
        Ok(Start { device, model: Model::empty(), seen: HashSet::new() })
    }

    fn make_volume(&self, device: &Arc<SimDevice>, seed: u64) -> Result<(), Failure> {
        let (env, _) = sim_env(seed ^ 0x6d6b_6673);
        let options =
            MkfsOptions { log_size: Some(self.log_bytes), force: true, ..MkfsOptions::default() };
        let device: Arc<dyn BlockDevice> = device.clone();
        let made = mkfs(&device, &options, &env);
        made.map(drop).map_err(|error| Failure {
            life: 0,
            stage: "mkfs".into(),
            what: error.to_string(),
        })
    }
}
