//! The simulated store.

use super::objects::Effect;
use super::turns::{Turns, World};
use ferry_object::{ObjectError, Store};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How often what goes wrong.
#[derive(Clone, Copy, Debug)]
pub(super) struct Faults {
    /// Of 1,000 requests so many are not answered with what they did.
    pub per_1000: u64,
    /// The longest time that an answer takes, but for few.
    pub answer_max: Duration,
    /// An owner sleeps after one of so many requests.
    pub sleep_one_in: u64,
    /// How long it sleeps, at most.
    pub sleep_max: Duration,
    /// How long a list may lag.
    pub list_lag: Duration,
}

/// The store as one owner reaches it.
pub(super) struct SimStore {
    pub turns: Arc<Turns>,
    pub owner: usize,
    pub faults: Faults,
    /// What the names of its volume's objects begin with: nothing, or a name and a slash.
    pub prefix: String,
}

enum Fault {
    None,
    Slept(Duration),
    NotDone,
    AnswerLost,
    DoneLate(Duration),
    DoneTwice(Duration),
}

impl SimStore {
    fn draw(&self, world: &mut World) -> Fault {
        let faults = &self.faults;
        if world.rng.below(faults.sleep_one_in) == 0 {
            let most = faults.sleep_max.as_millis() as u64;
            return Fault::Slept(Duration::from_millis(world.rng.below(most) + 1));
        }
        if world.rng.below(1000) >= faults.per_1000 {
            return Fault::None;
        }
        let late = match world.rng.below(3) {
            0 => world.rng.below(100),
            1 => world.rng.below(20_000),
            _ => world.rng.below(3_600_000),
        };
        let late = Duration::from_millis(late);
        match world.rng.below(4) {
            0 => Fault::NotDone,
            1 => Fault::AnswerLost,
            2 => Fault::DoneLate(late),
            _ => Fault::DoneTwice(late),
        }
    }

    fn way(&self) -> Duration {
        let most = self.faults.answer_max.as_micros() as u64;
        Duration::from_micros(self.turns.world().rng.below(most) + 1)
    }

    /// A request: it travels, it is carried out or not, and the answer travels.
    fn request<T>(
        &self,
        name: &str,
        effect: Option<&Effect>,
        answer: impl Fn(&mut World) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        self.turns.pass(self.owner, self.way());
        let owner = self.owner;
        let (result, fault) = {
            let world = &mut *self.turns.world();
            world.requests += 1;
            let fault = self.draw(world);
            let lost = || Err(ObjectError::Unavailable("simulated".into()));
            let result = match &fault {
                Fault::None | Fault::Slept(_) => answer(world),
                Fault::NotDone => lost(),
                Fault::AnswerLost => {
                    drop(answer(world));
                    lost()
                }
                Fault::DoneLate(time) => {
                    effect.into_iter().for_each(|effect| world.happen_after(*time, effect.clone()));
                    lost()
                }
                Fault::DoneTwice(time) => {
                    effect.into_iter().for_each(|effect| world.happen_after(*time, effect.clone()));
                    answer(world)
                }
            };
            let what = match effect {
                None => "get",
                Some(Effect::Create(..)) => "create",
                Some(Effect::Put(..)) => "put",
                Some(Effect::Delete(_)) => "delete",
            };
            let said = match &result {
                Ok(_) => "done".to_owned(),
                Err(error) => error.to_string(),
            };
            world.mix(&[name, what, &said]);
            world.note(|| format!("owner {owner}: {what} {name}: {said}"));
            (result, fault)
        };
        let back = match fault {
            Fault::Slept(time) => {
                self.turns.world().note(|| format!("owner {owner} sleeps {} s", time.as_secs()));
                time
            }
            _ => self.way(),
        };
        self.turns.pass(self.owner, back);
        result
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn change(&self, effect: &Effect) -> Result<(), ObjectError> {
        self.request(effect.name(), Some(effect), |world| {
            let now = world.now;
            world.objects.apply(effect, now)
        })
    }
}

impl Store for SimStore {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        let name = &self.key(name);
        self.request(name, None, |world| world.objects.read(name, range.clone()))
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        if name.starts_with("w/") {
            let sleep = self.turns.world().sleep_at_log[self.owner].take();
            sleep.into_iter().for_each(|time| self.turns.pass(self.owner, time));
        }
        self.change(&Effect::Create(self.key(name), Arc::new(bytes.to_vec())))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.change(&Effect::Put(self.key(name), Arc::new(bytes.to_vec())))
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.change(&Effect::Delete(self.key(name)))
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        let (lag, prefix) = (self.faults.list_lag, &self.key(prefix));
        let found = self.request(prefix, None, |world| {
            let World { now, rng, objects, .. } = world;
            Ok(objects.names(prefix, |changed| *now < changed + lag && rng.below(2) == 0))
        })?;
        let own = found.iter().filter_map(|key| key.strip_prefix(&self.prefix));
        Ok(own.map(str::to_owned).collect())
    }

    fn name(&self) -> Result<String, ObjectError> {
        Ok(self.prefix.strip_suffix('/').unwrap_or_default().into())
    }

    fn beside(&self, name: &str) -> Result<Arc<dyn Store>, ObjectError> {
        let prefix = if name.is_empty() { String::new() } else { format!("{name}/") };
        Ok(Arc::new(Self { turns: Arc::clone(&self.turns), prefix, ..*self }))
    }
}
