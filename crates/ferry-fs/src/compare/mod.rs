//! Other rules of exclusion between readers and writers of one file. Benchmarks compare them with the
//! rule of FerryFS (feature `compare`).

pub(crate) mod locking;
pub(crate) mod rwsem;
