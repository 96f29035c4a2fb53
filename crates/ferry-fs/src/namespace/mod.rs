//! Names and what they lead to: lookup, create, remove, rename, link, listing, attributes, extended
//! attributes, ACLs, and inodes without a name.

pub(crate) mod acl;
pub(crate) mod attributes;
pub(crate) mod create;
pub(crate) mod link;
pub(crate) mod listing;
pub(crate) mod names;
pub(crate) mod orphans;
pub(crate) mod remove;
pub(crate) mod rename;
pub(crate) mod xattr;
