//! Mounts the null file system: `null MOUNTPOINT [WORD…]`, with the words below. Counters go to
//! stderr at the end.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferry_bench::null::{Cache, NullFs, NullOptions};
use ferry_env::Env;
use ferry_fuse::{MountOptions, Session, Transport};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut arguments = std::env::args().skip(1);
    let mountpoint = arguments.next().ok_or("usage: null MOUNTPOINT [WORD…]")?;
    let mut options = NullOptions::default();
    let mut mount = MountOptions { fsname: "null".into(), ..MountOptions::default() };
    for word in arguments {
        match word.as_str() {
            "writeback" => options.cache = Cache::Writeback,
            "strict" => options.cache = Cache::Strict,
            "cached-create" => options.cached_create = true,
            "no-xattrs" => options.no_xattrs = true,
            "stalls" => options.stalls = true,
            "device" => mount.transport = Transport::Device,
            flush if flush.starts_with("flush-us=") => {
                options.flush_time = Duration::from_micros(flush["flush-us=".len()..].parse()?);
            }
            other => mount.threads = Some(other.parse()?),
        }
    }
    let fs = Arc::new(NullFs::new(&Env::real(), options));
    let session = Session::mount(fs, Path::new(&mountpoint), &mount)?;
    let handle = session.handle();
    session.wait();
    eprintln!("{}", handle.stats());
    Ok(())
}
