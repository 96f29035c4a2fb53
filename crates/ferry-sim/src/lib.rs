//! Test only: the world as it can go wrong. A run is a function of its seed.

pub mod device;
