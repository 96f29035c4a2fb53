//! Runs a plan: makes the volume that it begins on, then lives and crashes each life.

use crate::begin::{Begin, Prepared, Start};
use crate::crash::Life;
use crate::device::{SimDevice, SimRng, sim_env};
use crate::model::Model;
use crate::plan::{Failure, Plan, Tally, panic_text};
use ferry_device::BlockDevice;
use ferry_fs::volume::{MkfsOptions, mkfs};
use std::collections::HashSet;
use std::sync::Arc;

/// Marks the seed of the life before the first.
const EARLIER: u64 = 0x0065_6172_6c69_6572;

impl Plan {
    /// The same on a thread that has the seed's name, so that a panic says which run it was; where
    /// panics unwind, one is a failure like any other.
    pub fn run_apart(&self) -> Result<Tally, Failure> {
        let run = || self.run();
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name(format!("seed {}", self.seed))
                .spawn_scoped(scope, run);
            thread.expect("a thread can be started").join().unwrap_or_else(|panic| {
                Err(Failure {
                    life: self.lives.len() - 1,
                    stage: "panic".into(),
                    what: panic_text(Err(panic)),
                })
            })
        })
    }

    /// Runs and crashes it.
    pub fn run(&self) -> Result<Tally, Failure> {
        let mut tally = Tally { runs: 1, ..Tally::default() };
        let mut at = self.begin()?;
        for (number, ops) in self.lives.iter().enumerate() {
            let mut life = Life::new(self, number, at.seen, &mut tally);
            let history = life.live(&at.device, &mut at.model, ops)?;
            at = life.crash_everywhere(&at.device, &history)?;
        }
        Ok(tally)
    }

    /// The volume as some crash of the first life leaves it: a volume to do damage to.
    pub fn first_life_crashed(&self) -> Result<Arc<SimDevice>, Failure> {
        let mut tally = Tally::default();
        let mut at = self.begin()?;
        let mut life = Life::new(self, 0, at.seen, &mut tally);
        life.live(&at.device, &mut at.model, &self.lives[0])?;
        Ok(life.some_crash(&at.device))
    }

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
