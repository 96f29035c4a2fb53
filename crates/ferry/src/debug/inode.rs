//! Shows one inode: its record, its names, its attributes and entries or extents.

use ferry_check::inspect::Inspector;
use ferry_fs::keys;

use super::describe::{describe, printable};
use super::{Output, Printed};
use crate::error::CliError;
use crate::object;

/// Shows the inode, a line for each item. `false`: part of it is damaged.
pub fn show(inspector: &Inspector, ino: u64, out: &mut Output) -> Result<bool, CliError> {
    let (mut whole, mut any, mut printed) = (true, false, Printed::default());
    let geometry = inspector.superblock().geometry();
    let mut of_inode = |key: &[u8], value: &[u8]| {
        let mut item = describe(key, value);
        whole &= item["type"] != "damage";
        any = true;
        let at =
            item["device_offset"].as_u64().and_then(|at| at.checked_sub(geometry.segments_offset));
        if let Some(at) = at.filter(|_| geometry.segment_len > 0) {
            item["segment"] = (at / geometry.segment_len).into();
        }
        printed.note(out.item(&item))
    };
    let mut result = inspector
        .keys(&keys::inode(ino), &keys::inode_end(ino), &mut |key, value| of_inode(key, value));
    for key in [keys::orphan(ino), keys::intent(ino)] {
        match inspector.get(&key) {
            Ok(value) => value.is_some_and(|value| of_inode(&key, &value)),
            Err(error) => {
                result = result.and(Err(error));
                false
            }
        };
    }
    printed.end()?;
    let mut printed = Printed::default();
    let names = inspector.names(ino, &mut |directory, name| {
        any = true;
        printed.note(out.item(
            &object!({ "type": "named", "directory": directory, "name": printable(name), "inode": ino }),
        ))
    });
    printed.end()?;
    if let Err(error) = result.and(names) {
        out.damage(&error)?;
        return Ok(false);
    }
    if !any {
        return Err(CliError::Failed(format!("there is no inode {ino}")));
    }
    Ok(whole)
}
