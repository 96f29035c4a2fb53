//! POSIX access control lists, in the form that the kernel stores as extended attributes.
//!
//! A list that says no more than the mode bits is stored as the mode bits alone. The rules are
//! those of POSIX 1003.1e draft 17, section 23, as Linux applies them.

use crate::api::{Errno, Ino};
use crate::error::FsError;
use crate::keys;
use crate::local::local_fs::{LocalFs, errno};
use crate::patience;

/// The attribute that holds an inode's own list.
pub(crate) const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute that holds the list that a directory's new entries get.
pub(crate) const DEFAULT: &[u8] = b"system.posix_acl_default";
/// A longest list as stored, in bytes: more than 500 entries.
pub(crate) const ENCODED_MAX: usize = 4096;

const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NO_ID: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A valid list: the entries of each kind in order, with a mask where one is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl {
    entries: Vec<AclEntry>,
}

impl Acl {
    /// From the kernel's form; `None`: an empty list, which stands for none.
    pub(crate) fn decode(value: &[u8]) -> Result<Option<Self>, Errno> {
        let Some((version, rest)) = value.split_first_chunk::<4>() else {
            return if value.is_empty() { Ok(None) } else { Err(Errno(libc::EINVAL)) };
        };
        if u32::from_le_bytes(*version) != VERSION {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let (chunks, []) = rest.as_chunks::<8>() else { return Err(Errno(libc::EINVAL)) };
        let entry = |c: &[u8; 8]| AclEntry {
            tag: u16::from_le_bytes([c[0], c[1]]),
            perm: u16::from_le_bytes([c[2], c[3]]),
            id: u32::from_le_bytes([c[4], c[5], c[6], c[7]]),
        };
        let acl = Self { entries: chunks.iter().map(entry).collect() };
        match acl.entries.is_empty() {
            true => Ok(None),
            false if acl.is_valid() => Ok(Some(acl)),
            false => Err(Errno(libc::EINVAL)),
        }
    }

    /// Owner, users, group, groups, mask, other: in this order, the single ones once, the mask
    /// where there are users or groups.
    fn is_valid(&self) -> bool {
        let tags = [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER];
        let count = |tag| self.entries.iter().filter(|e| e.tag == tag).count();
        let known = self.entries.iter().all(|e| tags.contains(&e.tag) && e.perm & !7 == 0);
        let ordered = self.entries.is_sorted_by_key(|e| e.tag);
        let named = count(USER) + count(GROUP) > 0;
        let ids = self.entries.iter().all(|e| !matches!(e.tag, USER | GROUP) || e.id != NO_ID);
        let single = [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|t| count(*t) == 1);
        known && ordered && ids && single && count(MASK) <= 1 && (!named || count(MASK) == 1)
    }

    /// In the kernel's form.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(4 + 8 * self.entries.len());
        out.extend_from_slice(&VERSION.to_le_bytes());
        for e in &self.entries {
            let id = if matches!(e.tag, USER | GROUP) { e.id } else { NO_ID };
            out.extend_from_slice(&e.tag.to_le_bytes());
            out.extend_from_slice(&e.perm.to_le_bytes());
            out.extend_from_slice(&id.to_le_bytes());
        }
        out
    }

    /// What a mode's three digits stand for in this list: `(shift in the mode, index of the
    /// entry)`. The group's digit is the mask, where there is one.
    fn digits(&self) -> [(u32, usize); 3] {
        let at = |tag| self.entries.iter().position(|e| e.tag == tag);
        let entry = |tag| at(tag).expect("a valid list has an owner, a group and others");
        [(6, entry(USER_OBJ)), (3, at(MASK).unwrap_or_else(|| entry(GROUP_OBJ))), (0, entry(OTHER))]
    }

    /// The permission bits that the list stands for.
    pub(crate) fn mode(&self) -> u32 {
        self.digits().iter().map(|(shift, i)| u32::from(self.entries[*i].perm) << shift).sum()
    }

    /// Whether the mode bits alone say the same.
    pub(crate) fn is_minimal(&self) -> bool {
        self.entries.len() == 3
    }

    /// After chmod: the mode's digits are the list's.
    pub(crate) fn set_mode(&mut self, mode: u32) {
        for (shift, i) in self.digits() {
            self.entries[i].perm = (mode >> shift & 7) as u16;
        }
    }

    /// As the list of a new inode that was asked for with `mode`: both keep only what the other
    /// allows. Says whether the list has more to say than the mode then does.
    pub(crate) fn restrict_to_mode(&mut self, mode: &mut u32) -> bool {
        for (shift, i) in self.digits() {
            let perm = self.entries[i].perm & (*mode >> shift & 7) as u16;
            self.entries[i].perm = perm;
            *mode = *mode & !(7 << shift) | u32::from(perm) << shift;
        }
        !self.is_minimal()
    }
}

impl LocalFs {
    /// A stored list of an inode.
    pub(crate) fn stored_acl(&self, ino: Ino, name: &[u8]) -> Result<Option<Acl>, FsError> {
        patience::may_wait()?;
        let Some(value) = self.journal.get(&keys::xattr(ino, name))? else { return Ok(None) };
        Acl::decode(&value).map_err(|_| errno(libc::EIO))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Acl {
        Acl { entries: entries.iter().map(|&(tag, perm, id)| AclEntry { tag, perm, id }).collect() }
    }

    fn named() -> Acl {
        acl(&[
            (USER_OBJ, 7, NO_ID),
            (USER, 6, 1000),
            (GROUP_OBJ, 5, NO_ID),
            (GROUP, 4, 50),
            (MASK, 6, NO_ID),
            (OTHER, 1, NO_ID),
        ])
    }

    #[test]
    fn a_list_survives_and_a_wrong_one_is_refused() {
        assert_eq!(Acl::decode(&named().encode()), Ok(Some(named())));
        assert_eq!(Acl::decode(b""), Ok(None));
        assert_eq!(Acl::decode(&VERSION.to_le_bytes()), Ok(None));
        assert_eq!(Acl::decode(&[1, 0, 0, 0]), Err(Errno(libc::EOPNOTSUPP)));
        let einval = Err(Errno(libc::EINVAL));
        assert_eq!(Acl::decode(&named().encode()[..13]), einval);
        for bad in [
            acl(&[(USER_OBJ, 7, NO_ID), (GROUP_OBJ, 5, NO_ID)]),
            acl(&[(USER_OBJ, 7, NO_ID), (OTHER, 5, NO_ID), (GROUP_OBJ, 5, NO_ID)]),
            acl(&[(USER_OBJ, 8, NO_ID), (GROUP_OBJ, 5, NO_ID), (OTHER, 5, NO_ID)]),
            acl(&[(USER_OBJ, 7, NO_ID), (USER, 7, 1), (GROUP_OBJ, 5, NO_ID), (OTHER, 5, NO_ID)]),
            acl(&[
                (USER_OBJ, 7, NO_ID),
                (GROUP_OBJ, 5, NO_ID),
                (OTHER, 5, NO_ID),
                (OTHER, 5, NO_ID),
            ]),
            acl(&[
                (USER_OBJ, 7, NO_ID),
                (GROUP_OBJ, 5, NO_ID),
                (OTHER, 5, NO_ID),
                (0x40, 5, NO_ID),
            ]),
        ] {
            assert_eq!(Acl::decode(&bad.encode()), einval, "{bad:?}");
        }
    }

    #[test]
    fn the_mask_is_the_groups_digit() {
        let mut acl = named();
        assert_eq!(acl.mode(), 0o761);
        acl.set_mode(0o4640);
        assert_eq!(acl.mode(), 0o640);
        assert_eq!(acl.entries[2].perm, 5, "the owning group keeps its own bits behind the mask");
        assert!(!acl.is_minimal());
    }

    #[test]
    fn a_new_inode_gets_what_both_allow() {
        let (mut list, mut mode) = (named(), libc::S_IFREG | 0o4644);
        assert!(list.restrict_to_mode(&mut mode));
        assert_eq!(mode, libc::S_IFREG | 0o4640);
        assert_eq!(list.mode(), 0o640);
        let mut minimal = acl(&[(USER_OBJ, 6, NO_ID), (GROUP_OBJ, 4, NO_ID), (OTHER, 0, NO_ID)]);
        let mut mode = 0o777;
        assert!(!minimal.restrict_to_mode(&mut mode));
        assert_eq!(mode, 0o640);
    }
}
