//! The check of a whole volume: its superblocks, its journal, all keys in one pass.

use super::check::Checker;
use super::report::{Code, Finding, Findings, Holdings, Losses, Repair, Report};
use super::tree::Tree;
use super::verify::Verifier;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_fs::api::{Ino, ROOT};
use ferry_fs::keys;
use ferry_fs::scrub::{Location, Part};
use ferry_fs::volume::{Superblock, VolumeError, find_superblock, may_be_torn};
use ferry_journal::inspect::home_map;
use ferry_journal::{
    BadRange, Bystander, Geometry, Journal, JournalError, JournalOptions, Recovered, Step, Value,
    bad_map_slot,
};
use siphasher::sip::SipHasher13;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Memory for the home store's cache during a check, in bytes.
pub(super) const HOME_CACHE_BYTES: usize = 64 << 20;
/// Progress is told after each so many bytes that were read: a caller that wants to end a check
/// does not wait for more.
const PROGRESS_BYTES: u64 = 16 << 20;
/// A key and what is judged of it take the time of so many bytes.
const KEY_BYTES: u64 = 1 << 10;
/// Paths are looked for at most for so many findings: each costs a listing of every directory
/// above.
const PATHS_MAX: usize = 100;
/// A path is followed up through at most so many directories.
const DEPTH_MAX: usize = 4096;

/// How far a check has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Inodes checked so far.
    pub done: u64,
    /// Inodes that the volume says it has; 0 while unknown.
    pub total: u64,
}

/// How thorough a check is, and whom it tells how far it is.
#[derive(Default)]
pub struct FsckOptions<'p> {
    /// Read every block that holds data and check its checksum.
    pub verify_data: bool,
    /// A repair gives up what the device cannot read. Without this it keeps that: the device may
    /// read it the next time.
    pub give_up_unreadable: bool,
    /// Called when a part of the check begins, and now and then. A break ends the check, and so the
    /// repair, with [`VolumeError::Stopped`].
    pub progress: Option<&'p mut dyn FnMut(Progress) -> ControlFlow<()>>,
}

/// Tells a caller how far a check is, until that ends it.
struct Telling<'p> {
    tell: Option<&'p mut dyn FnMut(Progress) -> ControlFlow<()>>,
    at: Progress,
    /// Bytes that were read since it was told.
    bytes: u64,
    ended: bool,
}

impl<'p> Telling<'p> {
    fn new(tell: Option<&'p mut dyn FnMut(Progress) -> ControlFlow<()>>) -> Self {
        Self { tell, at: Progress { done: 0, total: 0 }, bytes: 0, ended: false }
    }

    /// So many more bytes were read. `false`: the caller ends the check.
    fn read(&mut self, bytes: u64) -> bool {
        self.bytes += bytes;
        if self.bytes >= PROGRESS_BYTES {
            self.tell();
        }
        !self.ended
    }

    fn tell(&mut self) {
        self.bytes = 0;
        if let Some(tell) = self.tell.as_mut().filter(|_| !self.ended) {
            self.ended = tell(self.at).is_break();
        }
    }

    /// The next part begins, unless the caller ends the check.
    fn next_part(&mut self) -> Result<(), VolumeError> {
        self.tell();
        if self.ended { Err(VolumeError::Stopped) } else { Ok(()) }
    }
}

/// Checks the volume on `dev`. An error means that it could not be checked; damage is in the
/// report.
pub fn fsck(
    dev: &Arc<dyn BlockDevice>,
    options: FsckOptions<'_>,
    env: &Env,
) -> Result<Report, VolumeError> {
    let (sb, _) = find_superblock(dev)?;
    check(dev, &sb, options, env, &mut [])
}

/// The check. `repairs` are to be told where what they repaired is now.
pub(super) fn check(
    dev: &Arc<dyn BlockDevice>,
    sb: &Superblock,
    options: FsckOptions<'_>,
    env: &Env,
    repairs: &mut [Repair],
) -> Result<Report, VolumeError> {
    let mut findings = Findings::default();
    compare_copies(dev, sb, &mut findings);
    check_contents(dev, sb, options, env, repairs, findings)
}

/// Checks a copy that has no superblocks yet.
pub(crate) fn check_copied(
    dev: &Arc<dyn BlockDevice>,
    sb: &Superblock,
    options: FsckOptions<'_>,
    env: &Env,
) -> Result<Report, VolumeError> {
    check_contents(dev, sb, options, env, &mut [], Findings::default())
}

/// The check of everything but the superblocks. `findings` are those of before.
fn check_contents(
    dev: &Arc<dyn BlockDevice>,
    sb: &Superblock,
    options: FsckOptions<'_>,
    env: &Env,
    repairs: &mut [Repair],
    mut findings: Findings,
) -> Result<Report, VolumeError> {
    findings.append(compare_slots(dev, sb));
    let data_read = options.verify_data;
    let journal_options = JournalOptions::offline(HOME_CACHE_BYTES);
    let opened = Journal::open(
        dev.clone(),
        sb.geometry(),
        journal_options,
        env.clone(),
        Arc::new(Bystander),
    );
    let (found, holdings, losses) = match opened {
        Ok((journal, recovered)) => check_view(dev, sb, &journal, &recovered, options, repairs)?,
        Err(error) => {
            let finding = journal_damage(&sb.geometry(), error)?;
            (Findings::of(finding), Holdings::default(), Losses::default())
        }
    };
    findings.append(found);
    Ok(Report {
        clean: findings.list.is_empty(),
        data_read,
        volume_id: sb.id(),
        findings: findings.list,
        findings_not_listed: findings.not_listed,
        repairs: Vec::new(),
        repaired: 0,
        lost: losses.list,
        lost_not_listed: losses.not_listed,
        holdings,
    })
}

/// Reads the whole view of an open journal.
fn check_view(
    dev: &Arc<dyn BlockDevice>,
    sb: &Superblock,
    journal: &Journal,
    recovered: &Recovered,
    options: FsckOptions<'_>,
    repairs: &mut [Repair],
) -> Result<(Findings, Holdings, Losses), VolumeError> {
    let mut telling = Telling::new(options.progress);
    telling.next_part()?;
    let hasher = SipHasher13::new_with_key(&sb.hash_key);
    let hash = |name: &[u8]| name_hash(&hasher, name);
    let verifier = options.verify_data.then(|| Verifier::new(dev));
    let mut checker = Checker::new(&sb.geometry(), &hash, &recovered.home_segments, verifier);
    checker.holdings.recovered_contexts = recovered.contexts;
    checker.holdings.unclean = recovered.unclean;
    // Over a page that is not what redb wrote, a search and a scan see different keys: nothing of
    // it is judged.
    let mut note = |bad: BadRange| {
        let what = format!("a page of the home store is damaged: {}", bad.detail);
        checker.findings.add(Finding::new(Code::HomeStore, what).on_device(bad.offset));
    };
    journal.verify_pages(&mut note, &mut |bytes| telling.read(bytes));
    telling.next_part()?;
    if !checker.findings.list.is_empty() {
        return Ok((checker.findings, checker.holdings, checker.losses));
    }
    let scanned = journal.scan(&[], &[0xff; 32], &mut |key, value| {
        let before = checker.holdings.data_bytes;
        checker.key(key, value);
        let data = if options.verify_data { checker.holdings.data_bytes - before } else { 0 };
        let total = checker.counters().map_or(0, |counters| counters.inodes);
        telling.at = Progress { done: checker.tree.inodes(), total };
        telling.read(KEY_BYTES + data)
    });
    telling.next_part()?;
    match scanned {
        Ok(()) => checker.finish(),
        // What was not read would look as if it were missing: only the reason is reported.
        Err(error) => checker.findings.add(Finding::new(Code::HomeStore, error.to_string())),
    }
    // A crash may leave a block that was being written so, and the next mount mends it.
    let offsets = match recovered.at_rest {
        true => bad_copies(journal, sb.home_map_offsets, options.verify_data, &mut |bytes| {
            telling.read(bytes)
        }),
        false => BTreeSet::new(),
    };
    telling.next_part()?;
    for offset in offsets {
        let finding = Finding::new(Code::HomeCopy, "a copy of a block is not what was written");
        checker.findings.add(finding.on_device(offset));
    }
    let (mut findings, mut losses) = (checker.findings, checker.losses);
    let found = findings.list.iter_mut().map(|finding| named(&mut finding.location));
    let repaired = repairs.iter_mut().map(|repair| named(&mut repair.location));
    let lost = losses.list.iter_mut().map(|range| (Some(range.ino), &mut range.path));
    set_paths(journal, &checker.tree, &mut found.into_iter());
    set_paths(journal, &checker.tree, &mut repaired.into_iter());
    set_paths(journal, &checker.tree, &mut lost.into_iter());
    Ok((findings, checker.holdings, losses))
}

/// Offsets of copies of the home store's blocks that are not what was written: those that a reader
/// needed, and with `all` the others, unless `step` ends that.
pub(super) fn bad_copies(
    journal: &Journal,
    slots: [u64; 2],
    all: bool,
    step: Step<'_>,
) -> BTreeSet<u64> {
    let mut offsets = BTreeSet::new();
    if all {
        let mut note = |bad: BadRange| {
            // The map's slots are looked at on their own.
            if !slots.contains(&bad.offset) {
                offsets.insert(bad.offset);
            }
        };
        journal.verify_home(&mut note, step);
    }
    offsets.extend(journal.home_bad_copies());
    offsets
}

fn named(location: &mut Location) -> (Option<Ino>, &mut Option<String>) {
    (location.ino, &mut location.path)
}

/// Finds the paths of the first of these inodes.
fn set_paths(
    journal: &Journal,
    tree: &Tree,
    inodes: &mut dyn Iterator<Item = (Option<Ino>, &mut Option<String>)>,
) {
    for (ino, path) in inodes.filter_map(|(ino, path)| Some((ino?, path))).take(PATHS_MAX) {
        *path = path_of(journal, tree, ino);
    }
}

/// The 54 bits of a name's hash, from `docs/format.md` and not from the code that it checks.
pub(super) fn name_hash(hasher: &SipHasher13, name: &[u8]) -> u64 {
    (hasher.hash(name) >> 10).max(1)
}

/// The volume was left while it was mounted, perhaps while its log grew: then the superblocks are
/// written one after the other, and the next mount makes them the same.
fn may_have_grown(dev: &Arc<dyn BlockDevice>, sb: &Superblock) -> bool {
    let maps = home_map(dev, &sb.geometry());
    maps.iter().any(Result::is_ok) && !maps.iter().flatten().any(|map| map.at_rest)
}

/// All copies of the superblock are the same, byte for byte, but for what a crash leaves.
fn compare_copies(dev: &Arc<dyn BlockDevice>, sb: &Superblock, findings: &mut Findings) {
    let mut copies = Vec::new();
    for offset in sb.offsets() {
        let mut copy = AlignedBuf::zeroed(BLOCK_SIZE);
        match dev.read(offset, &mut copy) {
            Ok(()) => copies.push(copy),
            Err(error) => {
                let what = format!("a superblock cannot be read: {error}");
                findings.add(Finding::new(Code::SuperblockCopy, what).on_device(offset));
            }
        }
    }
    let torn = || copies.iter().all(|copy| may_be_torn(copy, sb)) && may_have_grown(dev, sb);
    if copies.windows(2).any(|pair| pair[0][..] != pair[1][..]) && !torn() {
        let offsets: Vec<String> = sb.offsets().iter().map(u64::to_string).collect();
        let what = format!("the superblocks at bytes {} differ", offsets.join(", "));
        findings.add(Finding::new(Code::SuperblockCopy, what));
    }
}

/// Both slots of the home map say the same. A crash may leave one half written or behind, and the
/// next mount mends it: that is no damage.
fn compare_slots(dev: &Arc<dyn BlockDevice>, sb: &Superblock) -> Findings {
    bad_map_slot(dev, &sb.geometry()).map_or_else(Findings::default, |(offset, why)| {
        let what = format!("a copy of the home store's map is damaged: {why}");
        Findings::of(Finding::new(Code::HomeMap, what).on_device(offset))
    })
}

/// Damage is a finding; anything else says that the volume could not be checked.
fn journal_damage(geometry: &Geometry, error: JournalError) -> Result<Finding, VolumeError> {
    let Some((part, offset)) = Part::of_error(geometry, &error) else { return Err(error.into()) };
    let code = match (part, &error) {
        (Part::Log, JournalError::Unreadable { .. }) => Code::LogUnreadable,
        (Part::Log, _) => Code::Log,
        _ => Code::HomeStore,
    };
    let finding = Finding::new(code, error.to_string());
    Ok(offset.into_iter().fold(finding, Finding::on_device))
}

/// A path from the root to `ino`, as far as one can be found.
fn path_of(journal: &Journal, tree: &Tree, ino: Ino) -> Option<String> {
    let mut names = Vec::new();
    let mut at = ino;
    while at != ROOT {
        let dir = tree.directory_of(at).filter(|_| names.len() < DEPTH_MAX)?;
        names.push(name_in(journal, dir, at)?);
        at = dir;
    }
    if names.is_empty() {
        return Some("/".into());
    }
    Some(names.iter().rev().map(|name| format!("/{name}")).collect())
}

/// The first name of `ino` in `dir`.
fn name_in(journal: &Journal, dir: Ino, ino: Ino) -> Option<String> {
    let mut found = None;
    let mut visit = |key: &[u8], value: &Value| {
        let leads_there = keys::Dentry::decode(value).is_ok_and(|dentry| dentry.ino == ino);
        if let Some(keys::Key::Dentry(_, _, name)) = keys::parse(key).filter(|_| leads_there) {
            found = Some(name.escape_ascii().to_string());
        }
        found.is_none()
    };
    journal.scan(&keys::dentry_from(dir, 0), &keys::dentry_end(dir), &mut visit).ok()?;
    found
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::super::repair;
    use super::*;
    use crate::testing::{make_file, mount};
    use ferry_device::MemDevice;
    use ferry_fs::api::Filesystem;
    use ferry_fs::volume::{MkfsOptions, mkfs};

    #[test]
    fn a_check_and_a_repair_end_at_any_call_that_asks_for_it() {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(128 << 20));
        mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
        let fs = mount(&dev, false);
        make_file(&fs, ROOT, "f", &vec![7; 40 << 20]);
        fs.detach();
        fs.close().unwrap();
        let run = |n: usize, verify_data, work: fn(&_, FsckOptions<'_>, &_) -> Result<_, _>| {
            let mut calls = 0;
            let mut progress = |_: Progress| {
                calls += 1;
                if calls == n { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            let progress: Option<&mut dyn FnMut(Progress) -> ControlFlow<()>> = Some(&mut progress);
            let options = FsckOptions { verify_data, progress, ..FsckOptions::default() };
            let ended: Result<Report, VolumeError> = work(&dev, options, &Env::real());
            match ended {
                Ok(report) => assert!(report.clean && calls < n),
                Err(error) => assert!(matches!(error, VolumeError::Stopped) && calls == n),
            }
            calls
        };
        // The four parts, and with the data one for each 16 MiB.
        for (verify_data, calls) in [(false, 4), (true, 6)] {
            for n in 1..=calls + 1 {
                assert_eq!(run(n, verify_data, fsck), n.min(calls));
                assert_eq!(run(n, verify_data, repair), n.min(calls));
            }
        }
    }
}
