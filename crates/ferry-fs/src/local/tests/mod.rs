//! Tests of the namespace.
