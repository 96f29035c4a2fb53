//! What happened in a run, for its report. Its hash says whether two runs were the same.

use std::collections::VecDeque;
use std::fmt::Write;
use std::time::Duration;

/// So many events are remembered for a report.
const LAST_EVENTS: usize = 400;

/// What happened, in the order in which it happened.
pub(super) struct Event {
    pub(super) now: Duration,
    pub(super) id: u64,
    pub(super) what: What,
}

pub(super) enum What {
    Resumes,
    Polled,
    Called,
    Note(String),
}

impl Event {
    fn write(&self, text: &mut String) {
        let Self { now, id, what } = self;
        let what = match what {
            What::Resumes => "resumes",
            What::Polled => "is polled",
            What::Called => "is called",
            What::Note(note) => note,
        };
        let _fits = writeln!(text, "{:>12} {id:>5} {what}", now.as_micros());
    }
}

/// What happened, or its end.
pub(super) struct Trace {
    /// All of it is remembered, not only its end.
    whole: bool,
    events: VecDeque<Event>,
    pub(super) count: u64,
    pub(super) hash: u64,
}

impl Trace {
    pub(super) fn new(whole: bool) -> Self {
        Self { whole, events: VecDeque::new(), count: 0, hash: 0 }
    }

    pub(super) fn add(&mut self, event: Event) {
        let kind = match &event.what {
            What::Resumes => 1,
            What::Polled => 2,
            What::Called => 3,
            What::Note(note) => note.bytes().fold(4, |hash, byte| mix(hash, u64::from(byte))),
        };
        self.hash = mix(mix(mix(self.hash, event.now.as_nanos() as u64), event.id), kind);
        self.count += 1;
        if !self.whole && self.events.len() == LAST_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        self.events.iter().for_each(|event| event.write(&mut text));
        text
    }
}

fn mix(hash: u64, with: u64) -> u64 {
    (hash ^ with).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
