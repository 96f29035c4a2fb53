//! Whether a store keeps what a volume relies on. What says that it cannot be used is found before
//! a volume is made.

use crate::access::backoff;
use crate::error::ObjectError;
use crate::executor::Executor;
use crate::store::Store;
use ferry_env::Env;
use std::cell::Cell;
use std::sync::Barrier;

/// Names for which creates race, and how many race for each.
const NAMES: usize = 20;
const RACERS: usize = 32;
/// What the names of the proof's objects begin with.
pub(crate) const PROOFS: &str = "proof/";
/// A store that does not answer is asked so often in all.
const TRIES: u32 = 6;

/// Proves that a store can hold a volume: that of many creates of one name one succeeds, that the
/// keys may do what a volume does, and that the store keeps objects as they are. The result is what
/// the user should know besides. Nothing is left in the store.
pub fn prove(
    store: &dyn Store,
    executor: &dyn Executor,
    env: &Env,
) -> Result<Vec<String>, ObjectError> {
    let warnings = patiently(executor, || store.check_rules())?;
    let prefix = format!("{PROOFS}{:016x}/", env.entropy.next_u64());
    let proof = Proof { store, executor, prefix };
    let result = proof.run();
    let cleared = proof.clear();
    result.and(cleared).map(|()| warnings)
}

/// Repeats what the store does not answer, for a few seconds.
pub(crate) fn patiently<T>(
    executor: &dyn Executor,
    request: impl Fn() -> Result<T, ObjectError>,
) -> Result<T, ObjectError> {
    let mut tries = 1;
    loop {
        match request() {
            Err(error) if error.is_temporary() && tries < TRIES => {
                executor.pause(backoff(tries - 1));
                tries += 1;
            }
            other => return other,
        }
    }
}

struct Proof<'a> {
    store: &'a dyn Store,
    executor: &'a dyn Executor,
    prefix: String,
}

impl Proof<'_> {
    fn run(&self) -> Result<(), ObjectError> {
        self.prove_requests()?;
        self.prove_creates()
    }

    /// All requests in turn: a key that may not do one of them is found out here, with a text that
    /// says what it lacks.
    fn prove_requests(&self) -> Result<(), ObjectError> {
        let name = self.single();
        let bytes: Vec<u8> = (0..=255).cycle().take(70_000).collect();
        self.ask(|store| store.put(&name, &bytes))?;
        let whole = self.ask(|store| store.get(&name, None))?;
        let part = self.ask(|store| store.get(&name, Some(1000..1300)))?;
        let end = self.ask(|store| store.get(&name, Some(69_990..80_000)))?;
        if whole != bytes || part != bytes[1000..1300] || end != bytes[69_990..] {
            return Err(refused("it answers with other bytes than were written"));
        }
        if self.ask(|store| store.list(&self.prefix))? != [name.as_str()] {
            return Err(refused("its list of objects lacks one that was written before"));
        }
        self.ask(|store| store.delete(&name))?;
        match self.ask(|store| store.get(&name, Some(0..1))) {
            Err(ObjectError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(refused("an object that was deleted is still there")),
        }
    }

    fn prove_creates(&self) -> Result<(), ObjectError> {
        let barrier = Barrier::new(RACERS);
        let results: Vec<Vec<_>> = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..RACERS)
                .map(|racer| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        let create = |n| {
                            barrier.wait();
                            self.create(n, racer)
                        };
                        (0..NAMES).map(create).collect()
                    })
                })
                .collect();
            let join = |racer: std::thread::ScopedJoinHandle<'_, _>| {
                racer.join().expect("a racer does not panic")
            };
            racers.into_iter().map(join).collect()
        });
        for n in 0..NAMES {
            self.judge(n, results.iter().map(|of_racer: &Vec<_>| of_racer[n].clone()).collect())?;
        }
        Ok(())
    }

    /// One create of the race, repeated until it is answered.
    fn create(&self, n: usize, racer: usize) -> Result<Outcome, ObjectError> {
        let (name, bytes) = (self.name(n), content(racer));
        let unanswered = Cell::new(false);
        let result = patiently(self.executor, || {
            let result = self.store.create(&name, &bytes);
            unanswered.set(unanswered.get() || matches!(result, Err(ObjectError::Unavailable(_))));
            result
        });
        match result {
            Ok(()) => Ok(Outcome::Won),
            Err(ObjectError::Exists(_)) if unanswered.get() => Ok(Outcome::Unknown),
            Err(ObjectError::Exists(_)) => Ok(Outcome::Lost),
            Err(error) => Err(error),
        }
    }

    /// What the racers were told of a name must fit to the object that it has.
    fn judge(
        &self,
        n: usize,
        results: Vec<Result<Outcome, ObjectError>>,
    ) -> Result<(), ObjectError> {
        let outcomes: Vec<_> = results.into_iter().collect::<Result<_, _>>()?;
        let of = |wanted: Outcome| {
            let racers =
                outcomes.iter().enumerate().filter(move |(_, outcome)| **outcome == wanted);
            racers.map(|(racer, _)| racer)
        };
        let winners = of(Outcome::Won).count();
        if winners > 1 {
            return Err(refused(&format!(
                "{winners} of {RACERS} creates of one name succeeded at the same time \
                 (If-None-Match): two owners could overwrite each other"
            )));
        }
        let found = self.ask(|store| store.get(&self.name(n), None))?;
        let mut may_be = of(if winners == 1 { Outcome::Won } else { Outcome::Unknown });
        if !may_be.any(|racer| content(racer) == found) {
            return Err(refused("an object that was created is not the one that is there"));
        }
        match self.ask(|store| store.create(&self.name(n), b"late")) {
            Err(ObjectError::Exists(_)) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Err(refused("it creates an object whose name exists (If-None-Match)")),
        }
    }

    fn single(&self) -> String {
        format!("{}one", self.prefix)
    }

    fn name(&self, n: usize) -> String {
        format!("{}race-{n:02}", self.prefix)
    }

    fn ask<T>(
        &self,
        request: impl Fn(&dyn Store) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        patiently(self.executor, || request(self.store))
    }

    /// Removes what the proof has made, also what a list does not show yet.
    fn clear(&self) -> Result<(), ObjectError> {
        let names = (0..NAMES).map(|n| self.name(n));
        for name in names.chain([self.single()]) {
            self.ask(|store| store.delete(&name))?;
        }
        Ok(())
    }
}

/// What a racer knows after its create was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Won,
    Lost,
    /// The name exists, and an earlier try of its own was not answered.
    Unknown,
}

fn content(racer: usize) -> Vec<u8> {
    format!("racer {racer}").into_bytes()
}

fn refused(what: &str) -> ObjectError {
    ObjectError::Refused(format!("it cannot hold a volume: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dir::DirStore;
    use crate::executor::Job;
    use std::ops::Range;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    /// What a store does wrong.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fault {
        None,
        CreatesReplace,
        DeletesDoNothing,
        DeletesAreForbidden,
        RangesAreWhole,
        RulesDelete,
        AnswersAreLost,
    }

    struct Faulty {
        inner: DirStore,
        fault: Fault,
        requests: AtomicU64,
    }

    impl Faulty {
        fn lost<T>(&self, result: Result<T, ObjectError>) -> Result<T, ObjectError> {
            let n = self.requests.fetch_add(1, Ordering::Relaxed);
            if self.fault == Fault::AnswersAreLost && n.is_multiple_of(16) {
                return Err(ObjectError::Unavailable("lost".into()));
            }
            result
        }
    }

    impl Store for Faulty {
        fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
            let range = range.filter(|_| self.fault != Fault::RangesAreWhole);
            self.lost(self.inner.get(name, range))
        }
        fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
            if self.fault == Fault::CreatesReplace {
                self.inner.delete(name)?;
                return self.inner.put(name, bytes);
            }
            self.lost(self.inner.create(name, bytes))
        }
        fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
            self.lost(self.inner.put(name, bytes))
        }
        fn delete(&self, name: &str) -> Result<(), ObjectError> {
            match self.fault {
                Fault::DeletesDoNothing => Ok(()),
                Fault::DeletesAreForbidden => Err(ObjectError::Refused("s3:DeleteObject".into())),
                _ => self.lost(self.inner.delete(name)),
            }
        }
        fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
            self.lost(self.inner.list(prefix))
        }
        fn check_rules(&self) -> Result<Vec<String>, ObjectError> {
            match self.fault {
                Fault::RulesDelete => Err(ObjectError::Refused("rule".into())),
                _ => Ok(vec!["a warning".into()]),
            }
        }
    }

    /// Waits for nothing.
    struct Impatient;

    impl Executor for Impatient {
        fn start(&self, job: Job) {
            (job.run)()();
        }
        fn step(&self) -> bool {
            false
        }
        fn pause(&self, _time: Duration) {}
    }

    /// What the proof says, and what it leaves.
    fn proof_of(fault: Fault) -> (Result<Vec<String>, ObjectError>, Vec<String>) {
        let directory = tempfile::tempdir().expect("a directory");
        let env = Env::real();
        let inner = DirStore::open(directory.path(), env.clone()).expect("it is there");
        let store = Faulty { inner, fault, requests: AtomicU64::new(0) };
        let result = prove(&store, &Impatient, &env);
        (result, store.inner.list("").expect("it can be listed"))
    }

    #[test]
    fn a_store_that_keeps_the_rules_is_taken_and_left_as_it_was() {
        for fault in [Fault::None, Fault::AnswersAreLost] {
            let (result, left) = proof_of(fault);
            assert_eq!(result, Ok(vec!["a warning".into()]), "{fault:?}");
            assert_eq!(left, Vec::<String>::new(), "{fault:?}");
        }
    }

    #[test]
    fn a_store_that_breaks_a_rule_is_refused() {
        for (fault, word) in [
            (Fault::CreatesReplace, "If-None-Match"),
            (Fault::DeletesDoNothing, "still there"),
            (Fault::DeletesAreForbidden, "s3:DeleteObject"),
            (Fault::RangesAreWhole, "other bytes"),
            (Fault::RulesDelete, "rule"),
        ] {
            let (result, _) = proof_of(fault);
            let Err(ObjectError::Refused(text)) = result else { panic!("{fault:?}: {result:?}") };
            assert!(text.contains(word), "{fault:?}: {text}");
        }
    }
}
