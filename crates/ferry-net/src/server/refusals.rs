//! Refused clients: each is told why, counted by cause, and logged, but not as often as it tries.

use crate::rt::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::rt::Mutex;
use ferry_env::Clock;
use serde_json::Value;

use crate::refusal::{Cause, Refusal};

/// A client that is refused for the same cause again and again is logged so often.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Addresses and causes whose last log time is remembered.
const LOGGED_MAX: usize = 1024;

#[derive(Default)]
struct Counted {
    all: HashMap<Cause, u64>,
    /// When one was last logged, and how many came since.
    logged: HashMap<(Option<IpAddr>, Cause), (Duration, u64)>,
}

/// The refusals so far.
#[derive(Default)]
pub(super) struct Refusals(Mutex<Counted>);

impl Refusals {
    /// Counts one, and logs it unless the same was logged within [`LOG_INTERVAL`].
    pub(super) fn note(
        &self,
        clock: &dyn Clock,
        (from, certificate): (Option<SocketAddr>, Option<&str>),
        Refusal { cause, reason }: &Refusal,
    ) {
        if let Some(unsaid) = self.count(clock.monotonic(), from.map(|from| from.ip()), *cause) {
            let from = from.map(|from| from.to_string());
            tracing::warn!(
                from,
                certificate,
                again = (unsaid > 0).then_some(unsaid),
                "refused: {reason}"
            );
        }
    }

    /// `Some`: it is to be logged, and so many of the same were not since the last.
    fn count(&self, now: Duration, from: Option<IpAddr>, cause: Cause) -> Option<u64> {
        let mut counted = self.0.lock();
        *counted.all.entry(cause).or_default() += 1;
        let logged = &mut counted.logged;
        if logged.len() >= LOGGED_MAX {
            logged.retain(|_, (at, _)| now.saturating_sub(*at) < LOG_INTERVAL);
        }
        let is_full = logged.len() >= LOGGED_MAX;
        match logged.get_mut(&(from, cause)) {
            Some((at, unsaid)) if now.saturating_sub(*at) < LOG_INTERVAL => {
                *unsaid += 1;
                None
            }
            Some(one) => Some(std::mem::replace(one, (now, 0)).1),
            None if is_full => None,
            None => {
                logged.insert((from, cause), (now, 0));
                Some(0)
            }
        }
    }

    /// The number of refusals by cause.
    pub(super) fn json(&self) -> Value {
        let counted = self.0.lock();
        let of = |cause| counted.all.get(&cause).copied().unwrap_or(0);
        Cause::ALL.into_iter().map(|(cause, name)| (name, Value::from(of(cause)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_client_is_logged_once_a_minute_and_counted_each_time() {
        let refusals = Refusals::default();
        let ip = |n: u32| Some(IpAddr::from(n.to_be_bytes()));
        let secs = Duration::from_secs;
        assert_eq!(refusals.count(secs(0), ip(1), Cause::Version), Some(0));
        for second in 1..60 {
            assert_eq!(refusals.count(secs(second), ip(1), Cause::Version), None);
        }
        assert_eq!(refusals.count(secs(5), ip(2), Cause::Version), Some(0), "another address");
        assert_eq!(refusals.count(secs(5), ip(1), Cause::Revoked), Some(0), "another cause");
        assert_eq!(refusals.count(secs(60), ip(1), Cause::Version), Some(59));
        assert_eq!(
            (refusals.json()["version"].as_u64(), refusals.json()["tls"].as_u64()),
            (Some(62), None)
        );
        assert_eq!(refusals.json()["certificate_revoked"], 1);
        // Clients with many addresses fill neither the memory nor the log.
        for n in 0..4 * LOGGED_MAX as u32 {
            refusals.count(secs(61), ip(n), Cause::NoGreeting);
        }
        assert!(refusals.0.lock().logged.len() <= LOGGED_MAX);
        assert!(refusals.count(secs(200), ip(9), Cause::NoGreeting).is_some());
    }
}
