//! Mounts the null file system: `null MOUNTPOINT [WORD…]`, with the words below. Counters go to
//! stderr at the end.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferry_bench::null::{NullFs, NullOptions};
use ferry_env::Env;
use ferry_fs::CacheMode;
use ferry_fuse::{MountOptions, Session};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut arguments = std::env::args().skip(1);
    let mountpoint = arguments.next().ok_or("usage: null MOUNTPOINT [WORD…]")?;
    let mut options = NullOptions::default();
    let mount = MountOptions { fsname: "null".into(), ..MountOptions::default() };
    for word in arguments {
        match word.as_str() {
            "strict" => options.cache = CacheMode::Strict,
            "stalls" => options.stalls = true,
            flush if flush.starts_with("flush-us=") => {
                options.flush_time = Duration::from_micros(flush["flush-us=".len()..].parse()?);
            }
            other => return Err(format!("{other:?} is none of the words").into()),
        }
    }
    let fs = Arc::new(NullFs::new(&Env::real(), options));
    let session = Session::mount(fs, Path::new(&mountpoint), &mount)?;
    let handle = session.handle();
    session.wait();
    eprintln!("{}", handle.stats());
    Ok(())
}
