//! The server's clock, as far as the client knows it: what changes that are decided here are
//! stamped with.
//!
//! * Each answer to a greeting or a ping says what time it was at the server, some time between the
//!   question and the answer.
//! * The client's own wall clock has no part in it: setting it changes no file times.
//! * Times never go back: if the server's clock turns out to be behind what was told, time stands
//!   nearly still until that is over.

use std::time::Duration;

use ferry_fs::Timestamp;

/// Two clocks that are not set go apart by one part in so many, at most.
const DRIFT: u32 = 5000;

/// What is known.
#[derive(Debug, Default)]
pub(super) struct ServerClock {
    /// The newest answer that is believed.
    known: Option<Reading>,
    /// The newest time that was told, in nanoseconds.
    told: i128,
}

/// The time at the server, as a function of the monotonic clock here.
#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Duration,
    server: i128,
    /// It may have been so much earlier or later.
    error: Duration,
}

fn nanos(time: Duration) -> i128 {
    i128::try_from(time.as_nanos()).unwrap_or(i128::MAX)
}

impl Reading {
    /// Asked for and answered then.
    fn new(asked: Duration, answered: Duration, server: Timestamp) -> Self {
        let error = answered.saturating_sub(asked) / 2;
        Self { at: answered, server: server.0.saturating_add(nanos(error)), error }
    }

    fn server(&self, now: Duration) -> i128 {
        self.server.saturating_add(nanos(now.saturating_sub(self.at)))
    }

    fn error(&self, now: Duration) -> Duration {
        self.error + now.saturating_sub(self.at) / DRIFT
    }
}

impl ServerClock {
    /// The server has answered. An answer that took long is believed if it says something else than
    /// what is known allows.
    pub(super) fn heard(&mut self, asked: Duration, answered: Duration, server: Timestamp) {
        let heard = Reading::new(asked, answered, server);
        let believed = self.known.is_none_or(|known| {
            let apart = known.server(answered).abs_diff(heard.server);
            let errors = known.error(answered) + heard.error;
            heard.error <= known.error(answered) || apart > errors.as_nanos()
        });
        if believed {
            self.known = Some(heard);
        }
    }

    /// The time at the server: each time another one, and a later one.
    pub(super) fn now(&mut self, now: Duration) -> Timestamp {
        let known = self.known.map_or_else(|| nanos(now), |known| known.server(now));
        self.told = known.max(self.told.saturating_add(1));
        Timestamp(self.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(i128::from(ms) * 1_000_000)
    }

    #[test]
    fn the_server_clock_is_set_to_the_middle_of_the_round_trip() {
        let mut clock = ServerClock::default();
        clock.heard(ms(100), ms(120), at(5000));
        assert_eq!(clock.now(ms(120)), at(5010));
        assert_eq!(clock.now(ms(220)), at(5110));
    }

    #[test]
    fn a_slow_clock_sample_is_used_only_if_it_contradicts() {
        let mut clock = ServerClock::default();
        clock.heard(ms(0), ms(2), at(1000));
        clock.heard(ms(100), ms(300), at(1180));
        assert_eq!(clock.now(ms(302)), at(1301), "within its error");
        clock.heard(ms(400), ms(600), at(9000));
        assert_eq!(clock.now(ms(600)), at(9100), "the server's clock was set");
        clock.heard(ms(700), ms(702), at(9200));
        assert_eq!(clock.now(ms(702)), at(9201), "a better one");
    }

    #[test]
    fn the_server_clock_never_goes_back() {
        let mut clock = ServerClock::default();
        clock.heard(ms(0), ms(2), at(10_000));
        let before = clock.now(ms(2));
        clock.heard(ms(10), ms(12), at(7000));
        assert_eq!(clock.now(ms(12)), Timestamp(before.0 + 1));
        assert_eq!(clock.now(ms(12)), Timestamp(before.0 + 2));
        assert_eq!(clock.now(ms(4012)), at(11_001), "it was waited for");
    }
}
