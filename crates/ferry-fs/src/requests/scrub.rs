//! Scrubs of the mounted volume, as its users ask for them.

use crate::api::{Answer, Cx, ROOT, Stop};
use crate::error::FsError;
use crate::local::jobs::BlockingFsync;
use crate::local::local_fs::{LocalFs, errno};
use crate::requests::stats::{ended, index, json, number};
use crate::scrub::live::{Mounted, NotStarted, ScrubStatus};
use crate::scrub::report::Damage;
use crate::scrub::source::ScrubOptions;

/// Places of damage in one answer at most: what is left of them is asked for again.
const DAMAGE_PAGE: usize = 64;

impl LocalFs {
    /// Starts a scrub of the whole volume on a thread of its own; its number. `EBUSY`: one is on
    /// its way.
    pub fn start_scrub(&self, options: ScrubOptions) -> Result<u64, FsError> {
        let volume = Mounted {
            journal: self.journal.clone(),
            data: self.data.clone(),
            growing: self.growing.clone(),
            env: self.env.clone(),
        };
        let started = self.scrubs.start(volume, options, self.options.background);
        started.map_err(|why| match why {
            NotStarted::Running => errno(libc::EBUSY),
            NotStarted::Closed => errno(libc::ESHUTDOWN),
            NotStarted::NoThread => errno(libc::EAGAIN),
        })
    }

    /// Stops the scrub that is on its way, if one is; does not wait for its end.
    pub fn stop_scrub(&self) {
        self.scrubs.stop();
    }

    /// What the newest scrub is at.
    pub fn scrub_status(&self) -> ScrubStatus {
        self.scrubs.status(&self.env)
    }

    /// Damage that the newest scrub found, from this place in its list on, once it has ended.
    pub fn scrub_found(&self, from: usize, most: usize) -> Vec<Damage> {
        self.scrubs.damage(from, most)
    }

    pub(crate) fn scrub_start(&self, cx: &Cx<'_>, input: &[u8]) -> Result<Vec<u8>, FsError> {
        self.only_owner(cx)?;
        let rate = number(input)?;
        let number = self.start_scrub(ScrubOptions { rate: (rate > 0).then_some(rate) })?;
        Ok(number.to_ne_bytes().to_vec())
    }

    pub(crate) fn scrub_stop(&self, cx: &Cx<'_>) -> Result<Vec<u8>, FsError> {
        self.only_owner(cx)?;
        self.stop_scrub();
        Ok(Vec::new())
    }

    pub(crate) fn scrub_status_bytes(&self, out_max: usize) -> Result<Vec<u8>, FsError> {
        ended(json(&self.scrub_status()), out_max)
    }

    /// Only a caller that may look into every directory gets names of files.
    pub(crate) fn scrub_damage(
        &self,
        cx: &Cx<'_>,
        input: &[u8],
        out_max: usize,
    ) -> Result<Vec<u8>, FsError> {
        self.only_owner(cx)?;
        let from = index(input)?;
        let page = self.scrub_found(from, DAMAGE_PAGE);
        let mut most = page.len();
        loop {
            match ended(json(&page[..most]), out_max) {
                Err(_) if most > 1 => most /= 2,
                // One that is longer than an answer, which a path may be, goes without its path.
                Err(_) => {
                    return ended(
                        json(&page.iter().take(1).map(nameless).collect::<Vec<_>>()),
                        out_max,
                    );
                }
                answer => return answer,
            }
        }
    }

    /// Only root and the user that has mounted the volume may act on all of it.
    pub(crate) fn only_owner(&self, cx: &Cx<'_>) -> Result<(), FsError> {
        if cx.uid == 0 || cx.uid == self.options.owner { Ok(()) } else { Err(errno(libc::EPERM)) }
    }

    /// Does for these a change of the whole volume, which may wait, and answers with its bytes.
    /// `what` names it in the log. Parks, if there is a thread that may wait.
    pub(crate) fn change_volume(
        &self,
        cx: &Cx<'_>,
        what: &'static str,
        change: impl FnOnce(&Self) -> Result<Vec<u8>, FsError> + Send + 'static,
    ) -> Answer<Vec<u8>> {
        self.only_owner(cx)?;
        self.writable()?;
        if !self.options.background {
            return Ok(change(self)?);
        }
        let parked = cx.park::<Vec<u8>>(None);
        let then = move |fs: &Self| {
            parked.complete(change(fs).map_err(|error| fs.report(what, ROOT, error)));
        };
        self.blocking_fsyncs.push(BlockingFsync { files: Vec::new(), then: Box::new(then) });
        Err(Stop::Parked)
    }
}

fn nameless(damage: &Damage) -> Damage {
    let mut damage = damage.clone();
    damage.location.path = None;
    damage
}
