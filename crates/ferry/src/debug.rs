//! `ferry debug`: shows what is stored in a volume that is not mounted, item by item, as far as it
//! can be read.

mod describe;
mod inode;
mod log;

use std::io::{self, BufWriter, Write};
use std::process::ExitCode;
use std::sync::Arc;

use ferry_check::inspect::{Inspector, SegmentInfo, SegmentUse};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_fs::volume::{VolumeError, read_superblock_copies};
use ferry_fs::{LocalFs, Superblock, keys};
use serde_json::Value;

use crate::cli::{DebugArgs, DebugCommand};
use crate::error::CliError;
use crate::location::Location;
use crate::object;
use crate::open::{How, explain, open_when_free};
use crate::table;
use describe::{describe, hex, one_line};

/// The exit code if a requested item is damaged or unreadable; what can be read was printed.
const EXIT_DAMAGE: u8 = 4;

/// Runs the command.
pub fn run(args: &DebugArgs) -> Result<ExitCode, CliError> {
    let env = Env::real();
    let mut out =
        Output { to: BufWriter::new(io::stdout().lock()), json: args.json, closed: false };
    let opened = open_when_free(&args.volume, How::Read, &env)
        .map_err(|e| CliError::CouldNotRead(explain(&args.volume, &e).to_string()));
    let printed = opened.and_then(|opened| {
        let volume = Volume { at: &args.volume, device: opened.device.clone(), env };
        show(&volume, &args.what, &mut out)
    });
    if let (Err(error), true) = (&printed, args.json) {
        out.item(&object!({ "type": "error", "what": error.to_string() }))?;
    }
    out.flush()?;
    Ok(if printed? { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DAMAGE) })
}

/// Shows the requested items. `false`: some are damaged.
fn show(volume: &Volume<'_>, what: &DebugCommand, out: &mut Output) -> Result<bool, CliError> {
    match what {
        DebugCommand::Superblock => superblock(volume, out),
        DebugCommand::Log => log::show(volume, out),
        DebugCommand::Keys { from, limit, inode } => {
            let from = from.as_ref().map_or(&[][..], |hex| &hex.0);
            all_keys(volume, from, limit.unwrap_or(u64::MAX), *inode, out)
        }
        DebugCommand::Segments { summary } => segments(volume, *summary, out),
        DebugCommand::Inode { ino } => match volume.open() {
            Ok(inspector) => inode::show(&inspector, *ino, out),
            Err(error) => readable_keys(
                volume,
                &(keys::inode(*ino), keys::inode_end(*ino)),
                u64::MAX,
                error,
                out,
            ),
        },
        DebugCommand::Path { path } => {
            let inspector = volume.open()?;
            let found = inspector
                .resolve(path.as_encoded_bytes())
                .map_err(|e| volume.failed(&e))?
                .ok_or_else(|| {
                    CliError::Failed(format!("{}: there is no {} in it", volume.at, path.display()))
                })?;
            inode::show(&inspector, found, out)
        }
    }
}

/// The volume to show.
struct Volume<'v> {
    at: &'v Location,
    device: Arc<dyn BlockDevice>,
    env: Env,
}

impl Volume<'_> {
    fn failed(&self, error: &dyn std::fmt::Display) -> CliError {
        CliError::CouldNotRead(format!("{}: {error}", self.at))
    }

    /// The keys of the volume, as recovery would leave them.
    fn open(&self) -> Result<Inspector, CliError> {
        Inspector::open(&self.device, &self.env).map_err(|e| self.failed(&e))
    }

    /// The superblock that is in effect.
    fn superblock(&self) -> Result<Superblock, CliError> {
        LocalFs::read_superblock(&self.device).map_err(|e| self.failed(&e))
    }
}

/// The output: a line for each item.
struct Output {
    to: BufWriter<io::StdoutLock<'static>>,
    json: bool,
    /// The reader has stopped reading.
    closed: bool,
}

impl Output {
    /// Shows one item; `false`: the reader has stopped reading.
    fn item(&mut self, value: &Value) -> Result<bool, CliError> {
        let line = if self.json { value.to_string() } else { one_line(value) };
        self.line(&line)
    }

    fn line(&mut self, line: &str) -> Result<bool, CliError> {
        let written = writeln!(self.to, "{line}");
        self.check(written)?;
        Ok(!self.closed)
    }

    fn flush(&mut self) -> Result<(), CliError> {
        let flushed = self.to.flush();
        self.check(flushed)
    }

    fn check(&mut self, result: io::Result<()>) -> Result<(), CliError> {
        match result {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => self.closed = true,
            Err(e) => return Err(CliError::Failed(format!("cannot write to stdout: {e}"))),
            Ok(()) => {}
        }
        Ok(())
    }

    /// Shows an item that cannot be read.
    fn damage(&mut self, what: &dyn std::fmt::Display) -> Result<(), CliError> {
        self.item(&object!({ "type": "damage", "what": what.to_string() })).map(drop)
    }
}

/// Visits items until the reader stops; keeps the first error of the output.
#[derive(Default)]
struct Printed(Option<CliError>);

impl Printed {
    /// Shows one item; says whether to continue.
    fn note(&mut self, result: Result<bool, CliError>) -> bool {
        match result {
            Ok(go_on) => go_on,
            Err(error) => {
                self.0 = Some(error);
                false
            }
        }
    }

    fn end(self) -> Result<(), CliError> {
        self.0.map_or(Ok(()), Err)
    }
}

/// Shows all copies. `false`: one is damaged, or they differ, or the volume was truncated.
fn superblock(volume: &Volume<'_>, out: &mut Output) -> Result<bool, CliError> {
    let read = LocalFs::read_superblock(&volume.device);
    if let Err(
        error @ (VolumeError::Empty
        | VolumeError::TooShort
        | VolumeError::Foreign
        | VolumeError::Unfinished),
    ) = read
    {
        return Err(volume.failed(&error));
    }
    let copies = read_superblock_copies(&*volume.device);
    let same = copies.iter().all(|(_, copy)| copy.is_ok() && *copy == copies[0].1);
    let mut all = object!({ "device_size_bytes": volume.device.capacity(), "copies_agree": same });
    for (number, (offset, copy)) in copies.iter().enumerate() {
        all[format!("copy_{}", number + 1)] = match copy {
            Ok(sb) => object!({
                "offset": *offset,
                "format_version": sb.version,
                "compatible_features": format!("{:#x}", sb.compatible),
                "incompatible_features": format!("{:#x}", sb.incompatible),
                "volume_id": sb.id(),
                "label": sb.label.as_str(),
                "hash_key": hex(&sb.hash_key),
                "size_bytes": sb.size,
                "created_secs": sb.created_secs,
                "layout": sb.layout,
                "log_offset": sb.log_offset,
                "log_len_bytes": sb.log_len,
                "home_map_offsets": sb.home_map_offsets,
                "home_map_len_bytes": sb.home_map_len,
                "segments_offset": sb.segments_offset,
                "segment_len_bytes": sb.segment_len,
                "segment_count": sb.segment_count,
            }),
            Err(what) => object!({ "offset": *offset, "damage": what.as_str() }),
        };
    }
    let text = if out.json { all.to_string() } else { table::render(&all).trim_end().to_owned() };
    out.line(&text)?;
    Ok(same && read.is_ok())
}

/// Shows the keys from `from` on. `false`: not all could be decoded.
fn all_keys(
    volume: &Volume<'_>,
    from: &[u8],
    limit: u64,
    inode: Option<u64>,
    out: &mut Output,
) -> Result<bool, CliError> {
    let range = match inode {
        Some(ino) => (keys::inode(ino).max(from.to_vec()), keys::inode_end(ino)),
        None => (from.to_vec(), vec![0xff; 32]),
    };
    let inspector = match volume.open() {
        Ok(inspector) => inspector,
        Err(error) => return readable_keys(volume, &range, limit, error, out),
    };
    let (mut whole, mut printed, mut left) = (true, Printed::default(), limit);
    let mut show = |key: &[u8], value: &[u8]| {
        if left == 0 {
            return false;
        }
        left -= 1;
        let item = describe(key, value);
        whole &= item["type"] != "damage";
        printed.note(out.item(&item))
    };
    let mut scanned = inspector.keys(&range.0, &range.1, &mut |key, value| show(key, value));
    for key in inode.iter().flat_map(|ino| [keys::orphan(*ino), keys::intent(*ino)]) {
        match inspector.get(&key) {
            Ok(value) => value.is_some_and(|value| show(&key, &value)),
            Err(error) => {
                scanned = scanned.and(Err(error));
                false
            }
        };
    }
    printed.end()?;
    if let Err(error) = scanned {
        out.damage(&error)?;
        whole = false;
    }
    Ok(whole)
}

/// Shows the keys in `range` that are left of a volume that cannot be opened because of `error`.
fn readable_keys(
    volume: &Volume<'_>,
    range: &(Vec<u8>, Vec<u8>),
    limit: u64,
    error: CliError,
    out: &mut Output,
) -> Result<bool, CliError> {
    let (mut any, mut printed, mut left) = (false, Printed::default(), limit);
    let mut show = |key: &[u8], value: &[u8]| {
        if left > 0 && *range.0 <= *key && *key < *range.1 {
            any = true;
            left = if printed.note(out.item(&describe(key, value))) { left - 1 } else { 0 };
        }
    };
    let read =
        Inspector::readable_keys(&volume.device, &volume.env, &mut |key, value| show(key, value));
    printed.end()?;
    if read.is_err() || !any {
        return Err(error);
    }
    out.damage(&error)?;
    Ok(false)
}

/// Shows all segments. `false`: not all could be read.
fn segments(volume: &Volume<'_>, summary: bool, out: &mut Output) -> Result<bool, CliError> {
    let inspector = volume.open()?;
    let (mut whole, mut printed) = (true, Printed::default());
    let scanned = inspector.segments(&mut |info| {
        let mut go_on = printed.note(out.item(&segment(info)));
        whole &= info.used != SegmentUse::Unknown;
        if let (SegmentUse::Data(record), true, true) = (info.used, summary, go_on) {
            let read = inspector.summaries(info.index, record, &mut |block, entries| {
                let entries: Vec<_> = entries
                    .iter()
                    .map(|e| object!({ "inode": e.ino, "file_block": e.file_block, "block": e.at, "blocks": e.len }))
                    .collect();
                let item = object!({ "type": "summary", "segment": info.index, "block": block, "entries": entries });
                go_on = printed.note(out.item(&item));
                go_on
            });
            if let Err(error) = read {
                whole = false;
                let what = format!("segment {} cannot be read: {error}", info.index);
                go_on = printed.note(out.damage(&what).map(|()| true));
            }
        }
        go_on
    });
    printed.end()?;
    if let Err(error) = scanned {
        out.damage(&error)?;
        whole = false;
    }
    Ok(whole)
}

fn segment(info: &SegmentInfo) -> Value {
    let (used, counts) = match info.used {
        SegmentUse::Free => ("free", None),
        SegmentUse::Home => ("home", None),
        SegmentUse::Unknown => ("unknown", None),
        SegmentUse::Data(record) => ("data", Some(record)),
    };
    let mut item =
        object!({ "type": "segment", "segment": info.index, "use": used, "offset": info.offset });
    if let Some(record) = counts {
        item["filled_blocks"] = record.filled.into();
        item["live_blocks"] = record.live.into();
    }
    item
}
