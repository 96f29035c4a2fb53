//! Describes keys and values as JSON and text.

use ferry_fs::keys::{
    BLOCK, BadRecord, Counters, Dentry, Extent, INODE_HAS_XATTRS, INODE_INLINE, InodeRecord, Key,
    Number, Segment, parse,
};
use serde_json::{Map, Value};

use crate::object;

/// A key and its value as one object; its `type` is `damage` if it cannot be decoded.
pub fn describe(key: &[u8], value: &[u8]) -> Value {
    let Some(parsed) = parse(key) else {
        return object!({ "type": "damage", "what": "unknown key", "key": hex(key), "value": hex(value) });
    };
    let mut item = of(&parsed, value).unwrap_or_else(|bad| {
        object!({ "type": "damage", "what": bad.to_string(), "of": format!("{parsed:?}"), "value": hex(value) })
    });
    item["key"] = hex(key).into();
    item
}

fn of(key: &Key<'_>, value: &[u8]) -> Result<Value, BadRecord> {
    Ok(match key {
        Key::Counters => {
            let counters = Counters::decode(value)?;
            object!({ "type": "counters", "next_inode": counters.next_ino, "inodes": counters.inodes })
        }
        Key::Unwritten => object!({ "type": "reserved", "blocks": Number::decode(value)?.0 }),
        Key::Intent(ino) => {
            object!({ "type": "intent", "inode": *ino, "truncate_to_bytes": Number::decode(value)?.0 })
        }
        Key::Mark(session) => {
            object!({ "type": "mark", "session": format!("{session:032x}"), "change": Number::decode(value)?.0 })
        }
        Key::Synced(session) => {
            object!({ "type": "synced", "session": format!("{session:032x}"), "change": Number::decode(value)?.0 })
        }
        Key::Locker(session) => object!({ "type": "locker", "session": format!("{session:032x}") }),
        Key::Evicted(session) => {
            object!({ "type": "evicted", "session": format!("{session:032x}"), "number": Number::decode(value)?.0 })
        }
        Key::Orphan(ino) => object!({ "type": "orphan", "inode": *ino }),
        Key::Segment(index) => {
            let record = Segment::decode(value)?;
            object!({ "type": "segment", "segment": *index, "filled_blocks": record.filled, "live_blocks": record.live })
        }
        Key::Inode(ino) => inode(*ino, &InodeRecord::decode(value)?),
        Key::Xattr(ino, name) => {
            object!({ "type": "xattr", "inode": *ino, "name": printable(name), "bytes": value.len(), "value": hex(value) })
        }
        Key::Dentry(dir, cookie, name) => {
            let dentry = Dentry::decode(value)?;
            object!({
                "type": "name",
                "directory": *dir,
                "name": printable(name),
                "inode": dentry.ino,
                "kind": kind(dentry.kind),
                "cookie": *cookie,
            })
        }
        Key::Extent(ino, offset) => extent(*ino, *offset, &Extent::decode(value)?),
    })
}

fn inode(ino: u64, record: &InodeRecord) -> Value {
    let time = |t: ferry_fs::Timestamp| format!("{}.{:09}", t.secs(), t.nanos());
    let flag = |bit: u32| record.flags & bit != 0;
    let mut item = object!({
        "type": "inode",
        "inode": ino,
        "kind": kind(record.mode),
        "mode": format!("{:04o}", record.mode & 0o7777),
        "uid": record.uid,
        "gid": record.gid,
        "links": record.nlink,
        "size": record.size,
        "blocks": record.blocks,
        "inline": flag(INODE_INLINE),
        "xattrs": flag(INODE_HAS_XATTRS),
        "atime": time(record.atime),
        "mtime": time(record.mtime),
        "ctime": time(record.ctime),
        "btime": time(record.btime),
    });
    let unknown = record.flags & !(INODE_INLINE | INODE_HAS_XATTRS);
    for (key, number) in
        [("parent", record.parent), ("rdev", record.rdev.into()), ("unknown_flags", unknown.into())]
    {
        if number != 0 {
            item[key] = number.into();
        }
    }
    if record.mode & libc::S_IFMT == libc::S_IFLNK {
        item["target"] = printable(&record.inline).into();
    }
    item
}

fn extent(ino: u64, offset: u64, extent: &Extent) -> Value {
    let mut item = object!({
        "type": "extent",
        "inode": ino,
        "offset": offset,
        "length": extent.blocks() * BLOCK,
    });
    if let Extent::Data { block, crcs } = extent {
        item["device_offset"] = block.checked_mul(BLOCK).map_or(Value::Null, Value::from);
        item["checksums"] = crcs.iter().map(|crc| format!("{crc:08x}")).collect();
    }
    if let Extent::Unwritten { .. } = extent {
        item["promised"] = true.into();
    }
    item
}

/// The name of the file type in a mode.
fn kind(mode: u32) -> &'static str {
    match mode & libc::S_IFMT {
        libc::S_IFREG => "file",
        libc::S_IFDIR => "directory",
        libc::S_IFLNK => "symlink",
        libc::S_IFIFO => "fifo",
        libc::S_IFSOCK => "socket",
        libc::S_IFBLK => "block-device",
        libc::S_IFCHR => "character-device",
        _ => "unknown",
    }
}

/// Bytes as text; unprintable bytes are escaped.
pub fn printable(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An object on one line: its type, then its members. Checksums and the raw bytes of keys and
/// values are left out.
pub fn one_line(value: &Value) -> String {
    let empty = Map::new();
    let object = value.as_object().unwrap_or(&empty);
    let damaged = value["type"] == "damage";
    let mut line = value["type"].as_str().unwrap_or_default().to_owned();
    for (name, field) in object {
        let hidden = name == "type"
            || name == "checksums"
            || (!damaged && (name == "key" || name == "value"));
        if !hidden {
            line.push_str(&format!(" {}={}", name, word(field)));
        }
    }
    line
}

fn word(field: &Value) -> String {
    match field {
        Value::String(text) if text.is_empty() || text.contains([' ', '=', '"']) => {
            format!("{text:?}")
        }
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(word).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(fields) => {
            let fields: Vec<_> =
                fields.iter().map(|(name, field)| format!("{name}={}", word(field))).collect();
            fields.join(" ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferry_fs::keys;

    #[test]
    fn each_kind_of_key_has_its_words() {
        let record = InodeRecord {
            mode: libc::S_IFDIR | 0o755,
            parent: 3,
            size: 7,
            ..InodeRecord::default()
        };
        let data = Extent::Data { block: 10, crcs: vec![1, 0xabc] };
        let cases: [(Vec<u8>, Vec<u8>, &str); 7] = [
            (
                keys::counters(),
                Counters { next_ino: 9, inodes: 4 }.encode(),
                "counters inodes=4 next_inode=9",
            ),
            (
                keys::segment(2),
                Segment { filled: 5, live: 4 }.encode(),
                "segment filled_blocks=5 live_blocks=4 segment=2",
            ),
            (
                keys::extent(5, 4096),
                data.encode(),
                "extent device_offset=40960 inode=5 length=8192 offset=4096",
            ),
            (
                keys::extent(5, 0),
                Extent::Unwritten { blocks: 3 }.encode(),
                "extent inode=5 length=12288 offset=0 promised=true",
            ),
            (keys::orphan(6), vec![], "orphan inode=6"),
            (
                keys::dentry(1, 77, b"a b\n"),
                Dentry { ino: 5, kind: libc::S_IFREG }.encode().to_vec(),
                r#"name cookie=77 directory=1 inode=5 kind=file name="a b\\n""#,
            ),
            (keys::xattr(5, b"user.x"), b"v".to_vec(), "xattr bytes=1 inode=5 name=user.x"),
        ];
        for (key, value, line) in cases {
            assert_eq!(one_line(&describe(&key, &value)), line);
        }
        let line = one_line(&describe(&keys::inode(4), &record.encode()));
        assert!(
            line.contains("kind=directory")
                && line.contains("mode=0755")
                && line.contains("parent=3"),
            "{line}"
        );
        assert_eq!(
            describe(&keys::extent(5, 4096), &data.encode())["checksums"],
            Value::from(vec!["00000001", "00000abc"])
        );
    }

    #[test]
    fn garbage_is_shown_as_damage() {
        let mut x = 12_345_u64;
        for len in 0..60_usize {
            let bytes: Vec<u8> = (0..len)
                .map(|_| {
                    x = x
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (x >> 33) as u8
                })
                .collect();
            for key in [
                &bytes[..],
                &keys::inode(1),
                &keys::extent(1, 0),
                &keys::segment(1),
                &keys::dentry(1, 2, b"n"),
            ] {
                one_line(&describe(key, &bytes));
            }
        }
        assert_eq!(describe(b"?", b"v")["type"], "damage");
        let line = one_line(&describe(&keys::inode(1), b"v"));
        assert!(
            line.starts_with("damage ") && line.contains("Inode(1)") && line.contains("76"),
            "{line}"
        );
    }
}
