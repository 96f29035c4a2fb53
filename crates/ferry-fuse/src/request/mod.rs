//! What happens to one request between its decoding and its answer, whatever transport brought it.

pub(crate) mod chain;
pub(crate) mod counters;
pub(crate) mod crowd;
pub(crate) mod direct_write;
pub(crate) mod dispatch;
pub(crate) mod idle_poll;
pub(crate) mod parked;
pub(crate) mod realtime;
pub(crate) mod security_label;
pub(crate) mod trace;
