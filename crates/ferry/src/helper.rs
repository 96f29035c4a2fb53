//! The helper of mount(8), which calls this program as `mount.fuse.ferry SOURCE TARGET [-sfnv] [-N
//! namespace] [-o options] [-t type]`. (umount(8) calls no helper: it does not know the subtype of
//! a mounted FUSE file system.)

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::cli::MountArgs;
use crate::error::CliError;
use crate::location::Location;

/// What the helper's command line asks for.
#[derive(Debug)]
pub enum Asked {
    /// A mount; if the flag is set, unknown mount options are skipped.
    Mount(Box<MountArgs>, bool),
    /// Nothing: `-f` asks for a dry run.
    Nothing,
}

/// The helper's command, if the program was called by a helper's name.
pub fn parse(mut args: impl Iterator<Item = OsString>) -> Option<Result<Asked, CliError>> {
    let name = args.next()?;
    let name = Path::new(&name).file_name().and_then(OsStr::to_str)?.to_owned();
    match name.as_str() {
        "mount.fuse.ferry" | "mount.ferry" => Some(Words::read(args).and_then(Words::mount)),
        _ if is_generic(args) => Some(Err(CliError::Usage(
            "mount(8) has not found the helper mount.fuse.ferry, which must be installed: `scripts/install` does it, and so does the package"
                .into(),
        ))),
        _ => None,
    }
}

/// Whether fuse's own helper has called the program, which knows only `ferry VOLUME MOUNTPOINT -o
/// OPTIONS`. No command has a slash in its name.
fn is_generic(args: impl Iterator<Item = OsString>) -> bool {
    let args: Vec<OsString> = args.take(2).collect();
    let has_slash = |word: &OsString| word.as_encoded_bytes().contains(&b'/');
    let [volume, mountpoint] = &args[..] else { return false };
    !volume.as_encoded_bytes().starts_with(b"-") && has_slash(volume) && has_slash(mountpoint)
}

#[derive(Default)]
struct Words {
    positional: Vec<OsString>,
    options: Vec<String>,
    flags: Vec<char>,
}

impl Words {
    fn read(args: impl Iterator<Item = OsString>) -> Result<Self, CliError> {
        let mut words = Self::default();
        let mut args = args;
        while let Some(arg) = args.next() {
            let cluster = arg
                .to_str()
                .and_then(|a| a.strip_prefix('-'))
                .filter(|flags| !flags.is_empty())
                .map(str::to_owned);
            match cluster {
                None => words.positional.push(arg),
                Some(flags) => words.take_flags(&flags, &mut args)?,
            }
        }
        Ok(words)
    }

    /// Reads a cluster of one-letter flags. The rest of the cluster, or the next word, is the value
    /// of a letter that takes one.
    fn take_flags(
        &mut self,
        cluster: &str,
        args: &mut impl Iterator<Item = OsString>,
    ) -> Result<(), CliError> {
        for (at, flag) in cluster.char_indices() {
            if !matches!(flag, 'o' | 't' | 'N') {
                self.flags.push(flag);
                continue;
            }
            let rest = &cluster[at + 1..];
            let next = if rest.is_empty() { args.next() } else { Some(rest.into()) };
            let value = next.ok_or_else(|| CliError::Usage(format!("-{flag} wants a value")))?;
            match flag {
                'o' => self.options.push(
                    value
                        .into_string()
                        .map_err(|_| CliError::Usage("mount options must be UTF-8".into()))?,
                ),
                'N' => {
                    return Err(CliError::Usage(
                        "mounting into another namespace (-N) is not supported: use nsenter".into(),
                    ));
                }
                _ => {}
            }
            return Ok(());
        }
        Ok(())
    }

    fn has(&self, flag: char) -> bool {
        self.flags.contains(&flag)
    }

    fn mount(self) -> Result<Asked, CliError> {
        if self.has('f') {
            return Ok(Asked::Nothing);
        }
        let sloppy = self.has('s');
        let Ok([volume, mountpoint]) = <[OsString; 2]>::try_from(self.positional) else {
            return Err(CliError::Usage(
                "usage: mount.fuse.ferry VOLUME MOUNTPOINT [-sfnv] [-o OPTIONS]".into(),
            ));
        };
        let mut options = self.options;
        options.extend(self.flags.contains(&'r').then(|| "ro".to_owned()));
        let args = MountArgs {
            volume: Location::parse(&volume).map_err(CliError::Usage)?,
            mountpoint: mountpoint.into(),
            create: false,
            take_over: false,
            force: false,
            options,
            foreground: false,
            stop_timeout: MountArgs::STOP_TIMEOUT,
            daemon: false,
        };
        Ok(Asked::Mount(Box::new(args), sloppy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn called(line: &str) -> Option<Result<Asked, CliError>> {
        parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn the_commands_own_name_is_no_helper() {
        assert!(called("/usr/local/bin/ferry mount a b").is_none());
        assert!(called("ferry mount /srv/a.ferry /mnt -o ro").is_none());
        assert!(called("ferry --log-level=a/b /mnt").is_none());
    }

    #[test]
    fn a_call_of_fuses_own_helper_names_the_helper_that_is_missing() {
        for volume in ["/srv/a.ferry", "ferry://files.example.org/"] {
            let called = called(&format!("ferry {volume} /mnt -o rw,dev,suid"));
            let Some(Err(CliError::Usage(said))) = called else { panic!("{called:?}") };
            assert!(said.contains("mount.fuse.ferry"), "{said}");
        }
    }

    #[test]
    fn a_mount_as_mount_8_asks_for_it() {
        let asked = called("/sbin/mount.fuse.ferry /srv/a.ferry /mnt -sn -o rw,noatime -o user")
            .expect("a helper");
        let Ok(Asked::Mount(args, true)) = asked else { panic!("{asked:?}") };
        assert_eq!(args.volume.path(), Some(Path::new("/srv/a.ferry")));
        assert_eq!(args.options, ["rw,noatime", "user"]);
        assert!(!args.foreground);
    }

    #[test]
    fn a_fake_mount_does_nothing() {
        assert!(matches!(called("mount.ferry a b -f"), Some(Ok(Asked::Nothing))));
    }

    #[test]
    fn unsupported_helper_calls_are_refused() {
        for line in
            ["mount.ferry a", "mount.ferry a b c", "mount.ferry a b -N x", "mount.ferry a b -o"]
        {
            assert!(matches!(called(line), Some(Err(CliError::Usage(_)))), "{line}");
        }
    }
}
