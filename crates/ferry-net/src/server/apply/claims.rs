//! What a client tells a server that has taken the place of another: inodes that it knew, inode
//! numbers that it had, and that it has replayed everything.

use ferry_fs::{Errno, Ino, Needed, ROOT};

use super::applying::{Applying, Done};
use crate::codec::List;
use crate::message::{BATCH_MAX, Claim, Numbers, Outcome};
use crate::server::capability::{self, FoundIn};

impl Applying<'_> {
    /// The session knows again what the capabilities prove. What is missing stays unknown.
    pub(super) fn claim(&self, inodes: &List<Claim>) -> Done {
        if inodes.0.len() > BATCH_MAX {
            return Err(Errno(libc::EINVAL));
        }
        let with_dir = |claim: &Claim| {
            let found_in = capability::found_in(&self.core.key, &self.session.path, claim)?;
            Some((claim.ino, found_in))
        };
        let asked: Vec<&Claim> = inodes.0.iter().filter(|claim| claim.ino != ROOT).collect();
        // A client of before a rollback has some that prove nothing any more, among others.
        let claims: Vec<(Ino, FoundIn)> =
            asked.iter().filter_map(|claim| with_dir(claim)).collect();
        if claims.is_empty() && !asked.is_empty() {
            return Err(Errno(libc::EPERM));
        }
        // For the bounds the server also asks what is above the directory.
        let dir_of = |found_in: &FoundIn| match found_in {
            FoundIn::Dir(dir) => self.session.bounds.as_ref().map(|_| *dir),
            FoundIn::Somewhere => None,
        };
        let read = claims.iter().flat_map(|(ino, found_in)| [Some(*ino), dir_of(found_in)]);
        self.core.read_ahead(|| read.flatten().map(Needed::Inode));
        let mut found = Vec::with_capacity(claims.len());
        for (ino, found_in) in claims {
            if let Ok(Some(attr)) =
                self.call(|cx| self.fs().lookup(cx, ino, b".")).map(|entry| entry.attr)
            {
                let (dir, is_located) = match found_in {
                    FoundIn::Dir(dir) => (dir, true),
                    // The bounds of a session can be checked for directories alone.
                    FoundIn::Somewhere => {
                        let is_dir = attr.mode & libc::S_IFMT == libc::S_IFDIR;
                        (0, is_dir || self.session.bounds.is_none())
                    }
                };
                self.session.found_in(attr.ino, dir);
                if is_located && self.core.is_inside(self.session, attr.ino) {
                    found.push(attr.ino);
                } else {
                    let stamp = self.session.learn(self.fs(), attr.ino, dir);
                    self.session.forget(self.fs(), attr.ino, stamp);
                }
            } else if self.session.is_replaying() {
                self.session.reservations.add_missing(ino);
            }
        }
        // All get one stamp, and none that of another answer that the client has not seen.
        let now = self.core.env.clock.monotonic();
        Ok(Outcome::Count { count: self.session.learn_claimed(self.fs(), &found, now) })
    }

    /// The previous server gave these numbers to the client. What it has made under them is its
    /// own.
    pub(super) fn numbered(&self, numbers: &Numbers, made: &List<Ino>) -> Done {
        let range = numbers.first..numbers.first.saturating_add(numbers.count.into());
        if made.0.len() > BATCH_MAX || !self.session.is_replaying() {
            return Err(Errno(libc::EINVAL));
        }
        if numbers.capability != capability::of_numbers(&self.core.key, &self.session.path, &range)
        {
            return Err(Errno(libc::EPERM));
        }
        if !self.session.reservations.add_former(range.clone()) {
            return Err(Errno(libc::EINVAL));
        }
        let (mut claims, mut newest) = (Vec::new(), 0);
        let made = made.0.iter().filter(|ino| range.contains(ino));
        self.core.read_ahead(|| made.clone().map(|ino| Needed::Inode(*ino)));
        for ino in made {
            if let Some(stamp) = self.find_again(*ino, 0) {
                newest = stamp;
                let capability = capability::of_inode(&self.core.key, &self.session.path, *ino, 0);
                claims.push(Claim { ino: *ino, capability });
            }
        }
        Ok(Outcome::Claimed { claims: List(claims), stamp: newest })
    }

    /// Everything is replayed, and is durable, before others may change it. The client knows that
    /// before it says `Settled`. So the client never replays a second time over what others have
    /// done.
    pub(super) fn end_replay(&self) -> Done {
        self.session.replayed();
        Ok(Outcome::Count { count: self.session.durable() })
    }

    /// The session knows an inode again that it had found in `dir`, if it is there and within its
    /// bounds. Returns the stamp.
    fn find_again(&self, ino: Ino, dir: Ino) -> Option<u64> {
        let entry = self.call(|cx| self.fs().lookup(cx, ino, b".")).ok()?;
        let ino = entry.attr?.ino;
        let stamp = self.session.learn(self.fs(), ino, dir);
        if self.core.is_inside(self.session, ino) {
            return Some(stamp);
        }
        self.session.forget(self.fs(), ino, stamp);
        None
    }
}
