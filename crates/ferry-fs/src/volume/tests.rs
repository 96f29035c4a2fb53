//! Making volumes and recognising them.
