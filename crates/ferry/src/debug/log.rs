//! Shows the log: each of its records, and where recovery would end.

use ferry_journal::JournalError;
use ferry_journal::format::RecordKind;
use ferry_journal::inspect::{
    LogEnd, LogRecord, LogStart, Wholeness, home_map, log_end, log_records, log_start,
};
use serde_json::Value;

use super::{Output, Shown, Volume};
use crate::error::CliError;
use crate::object;

/// Shows the log. `false`: part of it is damaged, or of the home store, which says where the log
/// begins.
pub fn show(volume: &Volume<'_>, out: &mut Output) -> Result<bool, CliError> {
    let geometry = volume.superblock()?.geometry();
    let maps = home_map(&volume.device, &geometry);
    let mut whole = maps.iter().all(Result::is_ok);
    for (slot, map) in maps.iter().enumerate() {
        let item = match map {
            Ok(map) => object!({
                "type": "home-map",
                "slot": slot,
                "generation": map.generation,
                "home_bytes": map.len,
                "segments": map.units.iter().flatten().count(),
                "spare_segments": map.spare.len(),
                "at_rest": map.at_rest,
            }),
            Err(what) => {
                object!({ "type": "damage", "what": format!("slot {slot} of the home store's map: {what}") })
            }
        };
        out.item(&item)?;
    }
    let start = log_start(&volume.device, &geometry);
    let end = start.as_ref().map(|start| log_end(&volume.device, &geometry, start));
    if let Ok(start) = &start {
        out.item(&object!({
            "type": "start",
            "position": start.position,
            "context": start.seq.0,
            "clean": start.clean,
            "key_bytes": start.live_bytes,
        }))?;
    }
    let mut shown = Shown::default();
    let found = (start.as_ref().ok(), end.as_ref().ok().and_then(|end| end.as_ref().ok()));
    let read = log_records(&volume.device, &geometry, &mut |one| {
        shown.note(out.item(&record(one, found)))
    });
    shown.end()?;
    let mut say = |error: &JournalError, out: &mut Output| {
        whole = false;
        out.damage(error)
    };
    match (&start, end) {
        (Err(error), _) => say(error, out)?,
        (_, Ok(Ok(end))) => {
            out.item(&object!({
                "type": "end",
                "position": end.position,
                "offset": end.offset,
                "context": end.seq.0,
                "contexts_applied": end.contexts,
                "records_read": end.records,
                "read_bytes": end.bytes,
            }))?;
        }
        (_, Ok(Err(error))) => say(&error, out)?,
        (_, Err(_)) => {}
    }
    if let Err(error) = read {
        say(&error, out)?;
    }
    Ok(whole)
}

fn record(one: &LogRecord, (start, end): (Option<&LogStart>, Option<&LogEnd>)) -> Value {
    let header = &one.header;
    let fate = match (start, end) {
        (Some(start), _) if one.position < start.position => "in the home store",
        (Some(_), Some(end)) if one.position < end.position => "applied",
        (Some(_), Some(_)) => "behind the end",
        _ => "unknown",
    };
    object!({
        "type": "record",
        "position": one.position,
        "offset": one.offset,
        "blocks": one.blocks,
        "kind": match header.kind {
            RecordKind::Context => "context",
            RecordKind::ContextAfterData => "context-after-data",
            RecordKind::DurablePoint => "durable_point",
        },
        "context": header.seq,
        "durable_point": header.durable_point,
        "keys": header.keys,
        "extents": header.extents,
        "body_bytes": header.body_len,
        "id": format!("{:016x}", header.id),
        "previous": format!("{:016x}", header.prev),
        "state": match one.state {
            Wholeness::Whole => "whole".to_owned(),
            Wholeness::Missing(block) => format!("block {block} is missing"),
            Wholeness::BadBody => "wrong checksum".to_owned(),
        },
        "recovery": fate,
    })
}
