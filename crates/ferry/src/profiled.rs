//! The daemon's side of `ferry profile`: samples what its threads do, for as long as the caller
//! asks and is there to hear it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ferry_env::Env;
use ferry_env::activity::{Activity, Profile};
use serde_json::Value;

use crate::socket::{self, object};

/// The question for a profile; the number of seconds follows.
pub const PROFILE: &str = "profile:";
/// How long a profile takes, in seconds, at most.
pub const SECS_MAX: u64 = 60;
/// Profiles that a mount's daemon takes at the same time, at most.
const PROFILES_MAX: usize = 8;
/// The pause between two samples. It is no whole fraction of a second or a millisecond: what
/// happens once in a millisecond must not always fall between samples, or on one.
const INTERVAL: Duration = Duration::from_nanos(1_130_000);

/// For how long a question asks for a profile; `None`: it is another question.
pub fn time_of(question: &str) -> Option<Duration> {
    let seconds: u64 = question.strip_prefix(PROFILE)?.parse().ok()?;
    (1..=SECS_MAX).contains(&seconds).then(|| Duration::from_secs(seconds))
}

/// Takes profiles beside the other answers of a mount's daemon. Those must not wait for it.
#[derive(Clone)]
pub struct Profiles {
    /// The statistics of the requests. Each profile under way holds a reference.
    requests: Arc<dyn Fn() -> Value + Send + Sync>,
}

impl Profiles {
    /// `requests` gives the statistics of the requests.
    pub fn new(requests: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        Self { requests: Arc::new(requests) }
    }

    /// Begins a profile in a thread of its own if the question asks for one. Otherwise returns the
    /// caller's connection.
    pub fn take(&self, question: &str, stream: UnixStream) -> io::Result<Option<UnixStream>> {
        let Some(time) = time_of(question) else { return Ok(Some(stream)) };
        // One of the references is this one.
        if Arc::strong_count(&self.requests) > PROFILES_MAX {
            let busy = object([("error", "too many profiles are taken at the moment".into())]);
            return socket::say(stream, Some(busy)).map(|()| None);
        }
        let requests = Arc::clone(&self.requests);
        let body = move || {
            let Some(answer) = profile(&stream, time, &*requests) else { return };
            if let Err(error) = socket::say(stream, Some(answer)) {
                tracing::debug!(%error, "the caller of a profile has disconnected");
            }
        };
        std::thread::Builder::new().name("ferry-profile".into()).spawn(body)?;
        Ok(None)
    }
}

/// Samples for so long. `None`: the caller has hung up meanwhile.
pub fn profile(caller: &UnixStream, time: Duration, requests: &dyn Fn() -> Value) -> Option<Value> {
    let clock = Env::real().clock;
    let (before, begun) = (requests(), clock.monotonic());
    let mut profile = Profile::default();
    while clock.monotonic() - begun < time {
        profile.sample();
        if socket::hangs_up_within(caller, INTERVAL) {
            return None;
        }
    }
    let took = clock.monotonic() - begun;
    Some(json(&profile, took, &made_between(&before, &requests())))
}

/// How many requests of each kind there were between two looks at their statistics.
fn made_between(before: &Value, after: &Value) -> Value {
    let count = |stats: &Value, name: &str| stats["operations"][name]["count"].as_u64();
    let made = |(name, _): (&String, &Value)| {
        let made = count(after, name)? - count(before, name).unwrap_or(0);
        (made > 0).then(|| (name.clone(), Value::from(made)))
    };
    after["operations"].as_object().into_iter().flatten().filter_map(made).collect()
}

fn json(profile: &Profile, took: Duration, requests: &Value) -> Value {
    let one = |(activity, count): (&Activity, &u64)| {
        let layers: Vec<Value> = activity.layers().map(|layer| layer.name().into()).collect();
        object([
            ("operation", activity.operation().name().into()),
            ("background", activity.operation().is_background().into()),
            ("layers", layers.into()),
            ("count", (*count).into()),
        ])
    };
    object([
        ("time_ns", u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).into()),
        ("samples", profile.samples.into()),
        ("idle", profile.idle.into()),
        ("stacks", profile.seen.iter().map(one).collect()),
        ("requests", requests.clone()),
    ])
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "tests may unwrap")]
    use super::*;
    use std::io::Read;
    use std::net::Shutdown;

    use ferry_env::activity::{self, Layer, Operation};
    use serde_json::json;

    #[test]
    fn a_question_says_for_how_long() {
        assert_eq!(time_of("profile:3"), Some(Duration::from_secs(3)));
        for other in ["profile:0", "profile:61", "profile:", "profile:x", "profile:-1", "stats"] {
            assert_eq!(time_of(other), None, "{other}");
        }
    }

    #[test]
    fn a_profile_ends_when_its_caller_hangs_up_and_not_when_it_has_asked() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // A caller that has asked its question writes no more.
        theirs.shutdown(Shutdown::Write).unwrap();
        assert!(!socket::hangs_up_within(&ours, INTERVAL));
        drop(theirs);
        assert_eq!(profile(&ours, Duration::from_secs(3600), &|| Value::Null), None);
    }

    #[test]
    fn profiles_are_taken_beside_each_other_up_to_a_limit() {
        let profiles = Profiles::new(|| Value::Null);
        let ask = |question: &str| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (profiles.take(question, ours).unwrap(), theirs)
        };
        assert!(ask("alive").0.is_some(), "it is another question");
        let asking: Vec<_> = (0..PROFILES_MAX).map(|_| ask("profile:60").1).collect();
        let mut refused = String::new();
        ask("profile:1").1.read_to_string(&mut refused).unwrap();
        assert!(refused.contains("too many"), "{refused}");
        drop(asking);
        // The threads end when they notice it, and not after a minute.
        while Arc::strong_count(&profiles.requests) > 1 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_answer_has_the_layers_and_how_many_requests_were_made() {
        let _caller = UnixStream::pair().unwrap();
        let _doing = activity::begin(Operation::Fallocate);
        let _inside = activity::enter(Layer::DeviceFlush);
        let stats = |creates: u64| json!({"operations": {"create": {"count": creates}}});
        let looks = std::cell::Cell::new(0);
        let requests = || stats(looks.replace(7) + 5);
        let answer = profile(&_caller.0, Duration::from_millis(20), &requests).unwrap();
        let stacks = answer["stacks"].as_array().unwrap();
        let ours = stacks.iter().find(|one| one["operation"] == "fallocate").unwrap();
        assert_eq!(
            (&ours["layers"], &ours["background"]),
            (&json!(["device flush"]), &json!(false))
        );
        assert_eq!(
            (&ours["count"], &answer["requests"]),
            (&answer["samples"], &json!({"create": 7}))
        );
    }
}
