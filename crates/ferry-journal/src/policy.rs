//! When those who asked for durability sail: the fsync policies.

/// What is under way when the question is asked.
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    /// Records that were sealed and are not durable yet.
    pub in_flight: usize,
}

/// Decides when a context that somebody waits for is sealed.
pub trait Policy: Send + Sync {
    /// Seal now? If not, the question comes again when a record has become durable.
    fn sails(&self, traffic: Traffic) -> bool;
}

/// Whoever comes while a commit is under way boards the next one together; a lone caller never waits for company.
pub struct Gather;

impl Policy for Gather {
    fn sails(&self, traffic: Traffic) -> bool {
        traffic.in_flight == 0
    }
}
