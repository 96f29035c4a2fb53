//! `ferry upgrade`: gives a volume of an earlier release what volumes have that are made now. Of
//! format 4 that is the third copy of the superblock, in the volume's last block.

use std::cell::Cell;
use std::sync::Arc;

use ferry_fs::LocalFs;
use ferry_fs::ioctl::ResizeAnswer;

use crate::cli::UpgradeArgs;
use crate::control::print;
use crate::error::CliError;
use crate::resize;
use crate::waiting::stop_on_signals;

/// Runs the command.
pub fn run(args: &UpgradeArgs) -> Result<(), CliError> {
    let volume = &args.volume;
    let stop = stop_on_signals()?;
    let was_newest = Cell::new(false);
    let turn = |fs: &Arc<LocalFs>| {
        // As it was when the volume was opened.
        was_newest.set(fs.superblock().is_newest());
        Ok(fs.upgrade()?)
    };
    resize::alone(volume, turn, &stop, refusal)?;
    print(&match was_newest.get() {
        true => format!("{volume}: it has all that volumes of this release have\n"),
        false => format!("{volume}: upgraded: a third copy of its superblock is at its end\n"),
    })
}

/// Why it stays as it is.
fn refusal(answer: ResizeAnswer) -> String {
    match answer {
        ResizeAnswer::Stuck(_) => resize::refusal(answer),
        _ => "there is no room for a third copy of the superblock: remove files, or make the device longer; the volume is as it was"
            .into(),
    }
}
