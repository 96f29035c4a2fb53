//! Keys and values of the file system in the journal's view (`docs/format.md` draws them).
