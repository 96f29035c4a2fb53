//! The trace: which requests there were, for how long, and how they ended, for `ferry trace`.
//!
//! Nothing is recorded until somebody asks for it, and nothing any more when nobody has asked for
//! some seconds. Until then a request costs one look at a flag.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

use crate::abi::{self, InHeader, op};
use crate::decode::FuseOp;
use crate::request::counters::object;
use crate::request::idle_poll::now;

/// The recording ends when nobody has asked for so long.
const ASKED_WITHIN: Duration = Duration::from_secs(5);
/// Ended requests that are held until they are asked for, at most; the oldest are lost first.
const ENDED_MAX: usize = 1 << 16;
/// A process may get another name by execve(2): it is looked up again after this time.
const CALLER_VALID: Duration = Duration::from_millis(50);
/// Processes whose names are remembered, at most.
const CALLERS_MAX: usize = 1 << 12;
/// Requests in one answer, at most: with the longest names it is still one that a socket carries.
const ANSWER_MAX: usize = 1 << 11;

/// A request that is recorded.
#[derive(Debug)]
struct Traced {
    opcode: u32,
    begun: Instant,
    took: Duration,
    pid: u32,
    /// The name of the process, or of its thread.
    caller: Option<Arc<str>>,
    uid: u32,
    ino: u64,
    name: Option<Box<[u8]>>,
    /// Of a rename: the new directory and the new name.
    to: Option<(u64, Box<[u8]>)>,
    /// It exchanges the two names.
    exchanges: bool,
    /// Of a read or a write: the offset and the length.
    range: Option<(u64, u64)>,
    /// The inode that it has found or made.
    found: Option<u64>,
    errno: i32,
}

#[derive(Debug, Default)]
struct Trace {
    asked: Option<Instant>,
    /// Requests that are not answered, by the kernel's numbers for them.
    open: HashMap<u64, Traced>,
    ended: VecDeque<Traced>,
    /// So many have ended before the first of `ended`.
    before: u64,
    /// The names of processes that have asked lately, and when they were looked up.
    callers: HashMap<u32, (Instant, Option<Arc<str>>)>,
}

impl Trace {
    /// The name of a process: it may have ended when somebody asks for the trace.
    fn caller(&mut self, pid: u32, at: Instant) -> Option<Arc<str>> {
        if let Some((looked, name)) = self.callers.get(&pid)
            && at.saturating_duration_since(*looked) < CALLER_VALID
        {
            return name.clone();
        }
        if self.callers.len() >= CALLERS_MAX {
            self.callers.clear();
        }
        // The kernel's own requests have no process.
        let name = (pid != 0).then(|| std::fs::read(format!("/proc/{pid}/comm")).ok()).flatten();
        let name = name.map(|name| String::from_utf8_lossy(name.trim_ascii_end()).into());
        self.callers.insert(pid, (at, name.clone()));
        name
    }
}

/// How a request was answered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answered<'a> {
    /// With this body.
    Body(&'a [u8]),
    Errno(i32),
}

/// The trace of a mount.
#[derive(Debug, Default)]
pub(crate) struct Tracer {
    on: AtomicBool,
    trace: Mutex<Trace>,
}

impl Tracer {
    fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Records that a request begins, if somebody wants to know.
    pub(crate) fn begins(&self, head: &InHeader, op: &FuseOp<'_>, begun: Instant) {
        if !self.is_on() || !abi::has_answer(head.opcode) {
            return;
        }
        let mut trace = self.trace.lock();
        if trace.asked.is_none_or(|asked| begun.saturating_duration_since(asked) > ASKED_WITHIN) {
            self.on.store(false, Ordering::Relaxed);
            *trace = Trace { before: trace.before + trace.ended.len() as u64, ..Trace::default() };
            return;
        }
        let (name, to, range) = facts(op);
        let traced = Traced {
            opcode: head.opcode,
            begun,
            took: Duration::ZERO,
            pid: head.pid,
            caller: trace.caller(head.pid, begun),
            uid: head.uid,
            ino: head.nodeid,
            name: name.map(Into::into),
            to: to.map(|(dir, name)| (dir, name.into())),
            exchanges: matches!(*op, FuseOp::Rename { flags: libc::RENAME_EXCHANGE, .. }),
            range,
            found: None,
            errno: 0,
        };
        trace.open.insert(head.unique, traced);
    }

    /// Records that a request was answered. One that began before the recording is left out.
    pub(crate) fn ends(&self, unique: u64, took: Duration, how: Answered<'_>) {
        if !self.is_on() {
            return;
        }
        let mut trace = self.trace.lock();
        let Some(mut traced) = trace.open.remove(&unique) else { return };
        traced.took = took;
        match how {
            Answered::Body(body) if gives_an_inode(traced.opcode) => {
                let number = body.first_chunk::<8>().map(|bytes| u64::from_ne_bytes(*bytes));
                traced.found = number.filter(|ino| *ino != 0);
            }
            Answered::Body(_) => {}
            Answered::Errno(errno) => traced.errno = errno,
        }
        if trace.ended.len() == ENDED_MAX {
            trace.ended.pop_front();
            trace.before += 1;
        }
        trace.ended.push_back(traced);
    }

    /// The requests that have ended behind the first `after`, as far as they are still held and one
    /// answer may have them, how many were lost, and whether the recording had ended meanwhile. It
    /// goes on for some seconds. Without `after`: none yet.
    pub(crate) fn ask(&self, after: Option<u64>) -> Value {
        let asked = now();
        let mut trace = self.trace.lock();
        let before = trace.asked.replace(asked);
        let goes_on = before.is_some_and(|at| asked.saturating_duration_since(at) <= ASKED_WITHIN);
        self.on.store(true, Ordering::Relaxed);
        let end = trace.before + trace.ended.len() as u64;
        let asks_on = after.is_some();
        let after = after.map_or(end, |after| after.min(end));
        let lost = trace.before.saturating_sub(after);
        // Another caller may ask for them, too: they are held until others need their place.
        let read = usize::try_from(after.saturating_sub(trace.before)).unwrap_or(usize::MAX);
        let requests = trace.ended.iter().skip(read).take(ANSWER_MAX);
        let requests: Vec<Value> = requests.map(|one| one.json(asked)).collect();
        let next = after.max(trace.before) + requests.len() as u64;
        object([
            ("next", next.into()),
            ("lost", lost.into()),
            ("paused", (asks_on && !goes_on).into()),
            ("more", (next < end).into()),
            ("requests", requests.into()),
        ])
    }
}

impl Traced {
    fn json(&self, asked: Instant) -> Value {
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        let mut facts = object([
            ("operation", abi::op_name(self.opcode).into()),
            ("age_ns", nanos(asked.saturating_duration_since(self.begun)).into()),
            ("time_ns", nanos(self.took).into()),
            ("process", self.pid.into()),
            ("caller", self.caller.as_deref().into()),
            ("user", self.uid.into()),
            ("inode", self.ino.into()),
        ]);
        let mut add = |key: &str, value: Value| {
            facts.as_object_mut().expect("it is an object").insert(key.into(), value);
        };
        if let Some(name) = &self.name {
            add("name", text(name).into());
        }
        if let Some((dir, name)) = &self.to {
            add("to_inode", (*dir).into());
            add("to_name", text(name).into());
        }
        if self.exchanges {
            add("exchanges", true.into());
        }
        if let Some((offset, bytes)) = self.range {
            add("offset", offset.into());
            add("bytes", bytes.into());
        }
        if let Some(found) = self.found {
            add("found", found.into());
        }
        if self.errno != 0 {
            add("errno", self.errno.into());
        }
        facts
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Whether the answer begins with the number of an inode.
fn gives_an_inode(opcode: u32) -> bool {
    matches!(
        opcode,
        op::LOOKUP | op::CREATE | op::MKDIR | op::MKNOD | op::SYMLINK | op::LINK | op::TMPFILE
    )
}

/// The name in a request, the new one of a rename, and the range of a read or a write.
type Facts<'a> = (Option<&'a [u8]>, Option<(u64, &'a [u8])>, Option<(u64, u64)>);

fn facts<'a>(op: &FuseOp<'a>) -> Facts<'a> {
    match *op {
        FuseOp::Lookup { name }
        | FuseOp::Symlink { name, .. }
        | FuseOp::Mknod { name, .. }
        | FuseOp::Mkdir { name, .. }
        | FuseOp::Unlink { name }
        | FuseOp::Rmdir { name }
        | FuseOp::Link { name, .. }
        | FuseOp::Create { name, .. } => (Some(name), None, None),
        FuseOp::Rename { name, new_parent, new_name, .. } => {
            (Some(name), Some((new_parent, new_name)), None)
        }
        FuseOp::Read { offset, size, .. } => (None, None, Some((offset, u64::from(size)))),
        FuseOp::Write { offset, data, .. } => (None, None, Some((offset, data.len() as u64))),
        FuseOp::Fallocate { offset, len, .. } => (None, None, Some((offset, len))),
        _ => (None, None, None),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "tests may unwrap")]
    use super::*;
    use serde_json::json;
    use zerocopy::FromZeros;

    fn head(opcode: u32, unique: u64) -> InHeader {
        InHeader { opcode, unique, nodeid: 1, pid: 7, ..InHeader::new_zeroed() }
    }

    fn lookup(tracer: &Tracer, unique: u64, begun: Instant) {
        tracer.begins(&head(op::LOOKUP, unique), &FuseOp::Lookup { name: b"file" }, begun);
        tracer.ends(unique, Duration::from_micros(3), Answered::Body(&9_u64.to_ne_bytes()));
    }

    #[test]
    fn requests_are_recorded_from_the_first_question_on_and_each_is_told_once() {
        let tracer = Tracer::default();
        lookup(&tracer, 2, now());
        let first = tracer.ask(None);
        assert_eq!((&first["requests"], &first["next"]), (&json!([]), &json!(0)));
        lookup(&tracer, 4, now());
        tracer.begins(&head(op::FSYNC, 6), &FuseOp::Fsync { fh: 0, data_only: false }, now());
        let second = tracer.ask(first["next"].as_u64());
        let one = &second["requests"][0];
        assert_eq!(second["requests"].as_array().expect("requests").len(), 1, "{second}");
        assert_eq!((&one["operation"], &one["name"]), (&json!("lookup"), &json!("file")));
        assert_eq!((&one["found"], &one["time_ns"]), (&json!(9), &json!(3000)));
        tracer.ends(6, Duration::from_secs(1), Answered::Errno(libc::EIO));
        tracer.ends(6, Duration::from_secs(2), Answered::Errno(libc::EINTR));
        let third = tracer.ask(second["next"].as_u64());
        assert_eq!(third["requests"].as_array().expect("requests").len(), 1, "{third}");
        assert_eq!(third["requests"][0]["errno"], libc::EIO);
    }

    #[test]
    fn recording_ends_when_nobody_asks_any_more() {
        let tracer = Tracer::default();
        let next = tracer.ask(None)["next"].as_u64();
        lookup(&tracer, 2, now() + ASKED_WITHIN + Duration::from_secs(1));
        assert!(!tracer.is_on() && tracer.trace.lock().open.is_empty());
        assert_eq!(tracer.ask(next)["requests"], json!([]));
    }

    #[test]
    fn a_question_that_comes_too_late_is_told_that_the_recording_had_ended() {
        let tracer = Tracer::default();
        let first = tracer.ask(None);
        assert_eq!(first["paused"], false, "it begins");
        assert_eq!(tracer.ask(first["next"].as_u64())["paused"], false);
        let asked = tracer.trace.lock().asked.expect("it was asked");
        tracer.trace.lock().asked = asked.checked_sub(ASKED_WITHIN + Duration::from_secs(1));
        assert_eq!(tracer.ask(first["next"].as_u64())["paused"], true);
    }

    #[test]
    fn two_that_ask_are_told_the_same_requests() {
        let tracer = Tracer::default();
        let next = tracer.ask(None)["next"].as_u64();
        lookup(&tracer, 2, now());
        for _ in 0..2 {
            let answer = tracer.ask(next);
            assert_eq!(answer["requests"].as_array().expect("requests").len(), 1, "{answer}");
            assert_eq!((&answer["next"], &answer["more"]), (&json!(1), &json!(false)));
        }
        assert_eq!(tracer.ask(Some(1))["requests"], json!([]));
    }

    #[test]
    fn what_nobody_fetched_in_time_is_counted_as_lost() {
        let tracer = Tracer::default();
        let next = tracer.ask(None)["next"].as_u64();
        for n in 0..ENDED_MAX as u64 + 5 {
            lookup(&tracer, n, now());
        }
        let answer = tracer.ask(next);
        assert_eq!((&answer["lost"], &answer["more"]), (&json!(5), &json!(true)));
        assert_eq!(answer["requests"].as_array().expect("requests").len(), ANSWER_MAX);
        let (mut next, mut told) = (answer["next"].as_u64(), ANSWER_MAX);
        loop {
            let answer = tracer.ask(next);
            told += answer["requests"].as_array().expect("requests").len();
            assert_eq!(answer["lost"], 0);
            next = answer["next"].as_u64();
            if answer["more"] == false {
                break;
            }
        }
        assert_eq!(told, ENDED_MAX);
    }
}
