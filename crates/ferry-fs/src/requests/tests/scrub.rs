//! Scrubs: they find what is damaged, all of it and nothing else, whatever goes on meanwhile.

use crate::keys::{BLOCK, Extent, Key};
use crate::requests::tests::*;
use crate::scrub::live::ScrubState;
use crate::scrub::report::{Damage, Part, ScrubReport};
use crate::scrub::run::{scrub, scrub_source};
use crate::scrub::source::{ScrubOptions, ScrubProgress, Source, Watch};
use crate::volume::SUPERBLOCK_OFFSETS;
use ferry_device::AlignedBuf;
use ferry_env::Clock;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Lets a scrub run to its end, and never waits for real.
#[derive(Default)]
struct Patient;

impl Watch for Patient {
    fn progress(&mut self, _at: &ScrubProgress) -> bool {
        true
    }
    fn wait(&mut self, _time: Duration) -> bool {
        true
    }
}

fn offline(world: &World) -> ScrubReport {
    scrub(&world.dev, ScrubOptions::default(), &Env::real(), &mut Patient).unwrap()
}

/// Where a block of a file is on the device, in bytes.
fn location(world: &World, ino: Ino, block: u64) -> u64 {
    let mut found = None;
    world
        .fs
        .journal
        .scan(&keys::extent(ino, 0), &keys::extent_end(ino), &mut |key, value| {
            if let (Some(Key::Extent(_, offset)), Ok(Extent::Data { block: dev, crcs })) =
                (keys::parse(key), Extent::decode(value))
                && (offset / BLOCK..offset / BLOCK + crcs.len() as u64).contains(&block)
            {
                found = Some((dev + block - offset / BLOCK) * BLOCK);
            }
            true
        })
        .unwrap();
    found.expect("the block is mapped")
}

/// Changes one bit.
fn spoil(world: &World, at: u64) {
    let mut block = AlignedBuf::zeroed(BLOCK as usize);
    world.dev.read(at, &mut block).unwrap();
    block[30] ^= 8;
    world.dev.write(at, &block).unwrap();
}

fn contents(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Makes a file with contents.
fn filled(world: &World, dir: Ino, name: &str, blocks: u64) -> Ino {
    let (ino, fh) = world.create(dir, name).unwrap();
    world.write(ino, fh, 0, &contents(ino, (blocks * BLOCK) as usize)).unwrap();
    world.release(ino, fh);
    ino
}

/// The damaged blocks that a list of damage names.
fn blocks(damage: &[Damage]) -> Vec<(String, u64)> {
    let mut all = Vec::new();
    for d in damage.iter().filter(|d| d.part == Part::Data) {
        let (offset, length) = (d.location.file_offset.unwrap(), d.location.length.unwrap());
        let path =
            d.location.path.clone().unwrap_or_else(|| format!("inode {}", d.location.ino.unwrap()));
        all.extend((offset / BLOCK..(offset + length) / BLOCK).map(|block| (path.clone(), block)));
    }
    all.sort();
    all
}

#[test]
fn a_scrub_finds_exactly_what_is_damaged() {
    let world = World::new();
    let deep = world.mkdir(world.mkdir(ROOT, "a").unwrap(), "deep").unwrap();
    let first = filled(&world, deep, "first file", 700);
    let second = filled(&world, ROOT, "second", 20);
    filled(&world, ROOT, "inline", 0);
    let nameless = filled(&world, ROOT, "removed", 8);
    let held = world.open(nameless).unwrap();
    world.unlink(ROOT, "removed").unwrap();
    // Damage in what the durable point does not cover would be taken for the log's end by a mount
    // that opens the volume.
    world.fs.sync().unwrap();
    world.fs.journal.force_durable_point().unwrap();
    let sound = offline(&world);
    assert!(sound.clean && sound.complete, "{sound:#?}");
    assert_eq!(sound.verified.data_bytes, 728 * BLOCK);
    assert_eq!((sound.verified.superblocks, sound.passed_blocks), (3, 0));
    assert!(
        sound.verified.keys > 10 && sound.verified.home_bytes > 0 && sound.verified.log_bytes > 0
    );

    let planted =
        [(first, 0), (first, 299), (first, 300), (first, 699), (second, 7), (nameless, 3)];
    let at: Vec<u64> = planted.iter().map(|(ino, block)| location(&world, *ino, *block)).collect();
    at.iter().for_each(|at| spoil(&world, *at));
    let deep = |block| ("/a/deep/first file".to_owned(), block);
    let expected = vec![
        deep(0),
        deep(299),
        deep(300),
        deep(699),
        ("/second".to_owned(), 7),
        (format!("inode {nameless}"), 3),
    ];
    let check = |report: &ScrubReport| {
        assert!(report.complete && !report.clean);
        assert_eq!(blocks(&report.damage), expected);
        assert_eq!(report.damaged_blocks, 6);
        assert_eq!(report.damage.len(), 5, "neighbours are one place: {:#?}", report.damage);
        assert_eq!(report.verified.data_bytes, 722 * BLOCK);
        let mut offsets: Vec<_> =
            report.damage.iter().map(|d| d.location.device_offset.unwrap()).collect();
        let mut starts = at.clone();
        starts.remove(2);
        offsets.sort_unstable();
        starts.sort_unstable();
        assert_eq!(offsets, starts);
    };
    check(&offline(&world));
    // The mounted volume sees the device, not its caches, in which everything is well.
    let before = world.fs.data.stats();
    assert_eq!(world.fs.start_scrub(ScrubOptions::default()).unwrap(), 1);
    let status = world.fs.scrub_status();
    assert_eq!(
        (status.state, status.damaged_blocks, status.damage_listed),
        (ScrubState::Complete, 6, 5)
    );
    let report = ScrubReport {
        complete: true,
        damaged_blocks: 6,
        verified: status.verified,
        ..offline(&world)
    };
    check(&ScrubReport { damage: world.fs.scrub_found(0, 100), ..report });
    assert_eq!(world.fs.scrub_found(4, 100).len(), 1);
    let after = world.fs.data.stats();
    assert_eq!(
        (before.cache_bytes, before.evicted),
        (after.cache_bytes, after.evicted),
        "the cache is as it was"
    );
    assert_eq!(world.fs.stats()["scrub"]["damaged_blocks"], 6);
    world.release(nameless, held);
}

#[test]
fn a_scrub_finds_damage_outside_contents() {
    let world = World::new();
    filled(&world, ROOT, "file", 20);
    world.fs.sync().unwrap();
    world.fs.journal.force_durable_point().unwrap();
    spoil(&world, SUPERBLOCK_OFFSETS[1]);
    let geometry = world.fs.superblock().geometry();
    spoil(&world, geometry.home_map_offsets[1]);
    let parts = |report: &ScrubReport| {
        report.damage.iter().map(|d| (d.part, d.location.device_offset)).collect::<Vec<_>>()
    };
    let expected = vec![
        (Part::Superblock, Some(SUPERBLOCK_OFFSETS[1])),
        (Part::Home, Some(geometry.home_map_offsets[1])),
    ];
    let report = offline(&world);
    assert_eq!(parts(&report), expected, "{report:#?}");
    assert_eq!(report.verified.data_bytes, 20 * BLOCK);
    // The log's first block behind the checkpoint: recovery would need it.
    filled(&world, ROOT, "another", 1);
    world.fs.sync().unwrap();
    let start = ferry_journal::inspect::log_start(&world.dev, &geometry).unwrap();
    let first = geometry.log_offset + start.position * BLOCK % geometry.log_len;
    spoil(&world, first);
    world.fs.start_scrub(ScrubOptions::default()).unwrap();
    let found = world.fs.scrub_found(0, 10);
    let log = found.iter().find(|d| d.part == Part::Log).unwrap_or_else(|| panic!("{found:#?}"));
    assert!(log.location.device_offset.unwrap() == first, "{log}");
    assert_eq!(found.len(), 3);
    // A checkpoint needs it no more, and the scrub neither.
    world.fs.journal.checkpoint().unwrap();
    world.fs.start_scrub(ScrubOptions::default()).unwrap();
    assert!(world.fs.scrub_found(0, 10).iter().all(|d| d.part != Part::Log));
}

#[test]
fn keys_that_make_no_sense_are_found() {
    let world = World::new();
    let file = filled(&world, ROOT, "file", 3);
    world.fs.sync().unwrap();
    let mut txn = world
        .fs
        .journal
        .begin(ferry_journal::Credits { keys: 3, bytes: 500, urgent: false })
        .unwrap();
    txn.put(&keys::extent(file, 8 * BLOCK), &[9, 9]);
    txn.put(
        &keys::extent(file, 16 * BLOCK),
        &Extent::Data { block: u64::MAX - 1, crcs: vec![1, 2] }.encode(),
    );
    txn.put(b"\x77strange", b"");
    txn.commit();
    let report = {
        world.fs.start_scrub(ScrubOptions::default()).unwrap();
        world.fs.scrub_found(0, 10)
    };
    let found: Vec<_> = report
        .iter()
        .map(|d| (d.part, d.location.path.as_deref(), d.location.file_offset))
        .collect();
    let of_file = |block| (Part::Keys, Some("/file"), Some(block * BLOCK));
    assert_eq!(found, [of_file(8), of_file(16), (Part::Keys, None, None)], "{report:#?}");
}

/// A clock that stands still unless somebody waits.
struct Waited(Mutex<Duration>);

impl Clock for Waited {
    fn monotonic(&self) -> Duration {
        *self.0.lock()
    }
    fn wall(&self) -> Duration {
        *self.0.lock()
    }
}

/// Notes when how much was done; stops the scrub at `stop_at` bytes.
struct Recorder {
    clock: Arc<Waited>,
    seen: Vec<(Duration, u64)>,
    stop_at: u64,
}

impl Watch for Recorder {
    fn progress(&mut self, at: &ScrubProgress) -> bool {
        assert!(at.done_bytes <= at.total_bytes);
        self.seen.push((self.clock.monotonic(), at.done_bytes));
        at.done_bytes < self.stop_at
    }
    fn wait(&mut self, time: Duration) -> bool {
        *self.clock.0.lock() += time;
        true
    }
}

#[test]
fn a_scrub_keeps_its_rate_each_second() {
    const RATE: u64 = 3 << 20;
    let world = World::new();
    for i in 0..20 {
        filled(&world, ROOT, &format!("{i}"), 256);
    }
    world.fs.sync().unwrap();
    let scrub_to = |stop_at| {
        let clock = Arc::new(Waited(Mutex::new(Duration::from_secs(5))));
        let env = Env { clock: clock.clone(), entropy: Env::real().entropy };
        let mut recorder = Recorder { clock, seen: Vec::new(), stop_at };
        let report =
            scrub(&world.dev, ScrubOptions { rate: Some(RATE) }, &env, &mut recorder).unwrap();
        (report, recorder.seen)
    };
    let (report, seen) = scrub_to(u64::MAX);
    assert!(report.complete && report.clean);
    let largest = seen.windows(2).map(|w| w[1].1 - w[0].1).max().unwrap();
    assert!(seen.len() > 20, "{} steps, up to {largest} bytes", seen.len());
    for (i, (begin, before)) in seen.iter().enumerate() {
        for (end, after) in &seen[i..] {
            let allowed = RATE as u128 * (*end - *begin).as_nanos() / 1_000_000_000;
            assert!(u128::from(after - before) <= allowed + u128::from(largest) + 4096);
        }
    }
    let (whole, total) = (seen.last().unwrap().0 - seen[0].0, seen.last().unwrap().1);
    assert!(
        whole >= Duration::from_secs((total - largest) / RATE - 1),
        "{total} bytes in {whole:?}"
    );

    let (report, seen) = scrub_to(10 << 20);
    assert!(!report.complete && seen.last().unwrap().1 < 12 << 20);
}

#[test]
fn one_scrub_at_a_time_and_it_ends_with_the_mount() {
    let world = World::with(FsOptions {
        background: true,
        cache_bytes: 8 << 20,
        owner: 7,
        ..FsOptions::default()
    });
    filled(&world, ROOT, "file", 2000);
    world.fs.sync().unwrap();
    let slow = ScrubOptions { rate: Some(1 << 10) };
    assert_eq!(world.fs.start_scrub(slow).unwrap(), 1);
    assert_eq!(world.fs.start_scrub(slow).unwrap_err().errno(), Errno(libc::EBUSY));
    assert_eq!(world.fs.scrub_status().state, ScrubState::Running);
    world.fs.stop_scrub();
    let ended = |number| {
        while world.fs.scrub_status().state == ScrubState::Running {
            std::thread::yield_now();
        }
        assert_eq!(world.fs.scrub_status().number, number);
        world.fs.scrub_status().state
    };
    assert_eq!(ended(1), ScrubState::Stopped);
    // As its users ask for it.
    let ask = |uid, cmd, input: &[u8]| {
        InProcess { uid, ..InProcess::default() }
            .call(|cx| world.fs.ioctl(cx, ROOT, cmd, input, 16383))
    };
    let rate = (1_u64 << 10).to_ne_bytes();
    for cmd in [ioctl::SCRUB_START, ioctl::SCRUB_STOP, ioctl::SCRUB_DAMAGE] {
        assert_eq!(ask(8, cmd, &rate), Err(Errno(libc::EPERM)));
    }
    assert_eq!(ask(7, ioctl::SCRUB_START, &[1]), Err(Errno(libc::EINVAL)));
    assert_eq!(ask(7, ioctl::SCRUB_START, &rate), Ok(2_u64.to_ne_bytes().to_vec()));
    assert_eq!(ask(0, ioctl::SCRUB_START, &rate), Err(Errno(libc::EBUSY)));
    let status = ask(8, ioctl::SCRUB_STATUS, &[]).unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status[..status.len() - 1]).unwrap();
    assert_eq!((&status["state"], &status["number"]), (&"running".into(), &2.into()));
    assert_eq!(ask(0, ioctl::SCRUB_STOP, &[]), Ok(Vec::new()));
    assert_eq!(ended(2), ScrubState::Stopped);
    assert_eq!(ask(0, ioctl::SCRUB_DAMAGE, &[0; 8]), Ok(b"[]\0".to_vec()));
    // This one ends because the volume is closed.
    assert_eq!(world.fs.start_scrub(slow).unwrap(), 3);
    world.fs.close().unwrap();
    assert_eq!(world.fs.scrub_status().state, ScrubState::Stopped);
    assert_eq!(world.fs.start_scrub(slow).unwrap_err().errno(), Errno(libc::ESHUTDOWN));
}

/// The log has its segments, and the superblocks do not say so yet.
#[test]
fn a_scrub_while_the_log_grows_does_not_call_the_superblocks_damaged() {
    let world =
        World::with(FsOptions { background: true, cache_bytes: 8 << 20, ..FsOptions::default() });
    let sb = crate::volume::read_superblock(&world.dev).unwrap();
    let growing = world.fs.growing.lock();
    let segments = u32::try_from(sb.log_len / sb.segment_len).unwrap() + 1;
    let longer = sb.with_log_behind(segments).geometry();
    assert!(world.fs.data.take_last_segments(segments, &longer));
    world.fs.start_scrub(ScrubOptions::default()).unwrap();
    let mut looks = 0..10_000;
    while looks.next().is_some() && world.fs.scrub_status().state == ScrubState::Running {
        std::thread::yield_now();
    }
    world.fs.data.give_last_segments_back(&sb.geometry());
    drop(growing);
    while world.fs.scrub_status().state == ScrubState::Running {
        std::thread::yield_now();
    }
    assert_eq!(world.fs.data.geometry(), sb.geometry());
    let status = world.fs.scrub_status();
    assert_eq!((status.state, status.damaged_blocks), (ScrubState::Complete, 0));
    assert_eq!(status.verified.superblocks, 3);
}

/// Between looking up where blocks are and reading them, a file is removed, its segment is filled
/// with others' contents, and another file is moved.
struct Meddler<'w> {
    world: &'w World,
    calls: u64,
}

impl Watch for Meddler<'_> {
    fn progress(&mut self, _at: &ScrubProgress) -> bool {
        let world = self.world;
        self.calls += 1;
        for name in ["comes and goes", "another"] {
            if self.calls > 1 {
                world.unlink(ROOT, name).unwrap();
            }
            let ino = filled(world, ROOT, name, 600);
            world.fs.forget(ino, 1);
            world.fs.sync().unwrap();
            world.fs.journal.force_durable_point().unwrap();
            world.fs.data.clean_once().unwrap();
        }
        self.calls < 40
    }
    fn wait(&mut self, _time: Duration) -> bool {
        true
    }
}

#[test]
fn a_block_freed_before_the_scrub_reads_it_is_not_damage() {
    let world = World::new();
    let resting = filled(&world, ROOT, "resting", 50);
    world.fs.sync().unwrap();
    spoil(&world, location(&world, resting, 21));
    let data = &world.fs.data;
    let source = Source {
        device: data.device(),
        geometry: data.geometry(),
        superblocks: crate::volume::read_superblock_copies(&*world.dev),
        segments: &|| data.geometry().segment_count,
        journal: &world.fs.journal,
        settled: &|block| data.wait_written(block),
        live_bytes: 0,
    };
    let mut meddler = Meddler { world: &world, calls: 0 };
    let report = scrub_source(&source, ScrubOptions::default(), &Env::real(), &mut meddler);
    assert_eq!(blocks(&report.damage), [("/resting".to_owned(), 21)]);
    assert_eq!(report.damaged_blocks, 1);
    assert!(report.passed_blocks > 0, "{report:?}");
}

/// A scrub that began before the volume was made longer finds data behind the old end.
#[test]
fn data_behind_the_end_that_a_volume_had_is_no_damage() {
    let world = World::new();
    filled(&world, ROOT, "file", 50);
    world.fs.sync().unwrap();
    let data = &world.fs.data;
    let now = data.geometry();
    let damaged = |segments: u32| {
        let source = Source {
            device: data.device(),
            geometry: ferry_journal::Geometry { segment_count: 1, ..now },
            superblocks: Vec::new(),
            segments: &|| segments,
            journal: &world.fs.journal,
            settled: &|block| data.wait_written(block),
            live_bytes: 0,
        };

        scrub_source(&source, ScrubOptions::default(), &Env::real(), &mut Patient).damaged_blocks
    };
    assert!(damaged(1) > 0, "data lies behind the first segment");
    assert_eq!(damaged(now.segment_count), 0);
}

/// Files are overwritten, removed and made anew and segments cleaned while scrubs run one after the
/// other, until the cleaner has had its turn: each finds what was planted in a file that rests, and
/// nothing else.
#[test]
fn a_scrub_of_a_busy_volume_finds_no_damage() {
    const FILES: u64 = 12;
    const BLOCKS: u64 = 200;
    let world =
        World::with(FsOptions { background: true, cache_bytes: 4 << 20, ..FsOptions::default() });
    let resting = filled(&world, ROOT, "resting", 50);
    world.fs.sync().unwrap();
    spoil(&world, location(&world, resting, 21));
    let over = AtomicBool::new(false);
    let write = |seed: u64| {
        let mut x = seed * 0x9e37_79b9 + 1;
        let mut random = |below: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x % below
        };
        while !over.load(Ordering::Relaxed) {
            let name = format!("file {seed} {}", random(FILES / 2));
            let found = world.lookup(ROOT, &name).unwrap();
            let ino = match found {
                Some(attr) => attr.ino,
                None => world.file(ROOT, &name).unwrap(),
            };
            let fh = world.open(ino).unwrap();
            for _ in 0..20 {
                let at = random(BLOCKS) * BLOCK;
                world
                    .write(
                        ino,
                        fh,
                        at,
                        &contents(random(u64::MAX), (1 + random(6)) as usize * 4096),
                    )
                    .unwrap();
            }
            world.release(ino, fh);
            if found.is_some() {
                world.fs.forget(ino, 1);
            }
            if random(4) == 0 {
                world.unlink(ROOT, &name).unwrap();
            }
            if random(3) == 0 {
                world.fs.sync().unwrap();
            }
        }
    };
    std::thread::scope(|scope| {
        let (write, over, world) = (&write, &over, &world);
        scope.spawn(move || write(1));
        scope.spawn(move || write(2));
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                world.fs.data.clean_once().unwrap();
            }
        });
        for number in 1..=3000 {
            if number > 30 && world.fs.data.stats().cleaned_segments > 0 {
                break;
            }
            assert_eq!(world.fs.start_scrub(ScrubOptions::default()).unwrap(), number);
            while world.fs.scrub_status().state == ScrubState::Running {
                std::thread::yield_now();
            }
            let status = world.fs.scrub_status();
            let found = world.fs.scrub_found(0, 100);
            if status.damaged_blocks != 1 || blocks(&found) != [("/resting".to_owned(), 21)] {
                over.store(true, Ordering::Relaxed);
                panic!("scrub {number}: {found:#?}");
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(world.fs.data.stats().cleaned_segments > 0);
}
