//! How fast a store is by itself: creates of small objects, one at a time and many together, and
//! large objects written and read in parallel. `rate s3://BUCKET/PREFIX [small|large]` or `rate
//! DIRECTORY [small|large]`; `small` has creates of 8 KiB only, `large` large objects only, 8 at a
//! time. Keys and endpoint come from the environment. What it makes it deletes again.

use ferry_env::Env;
use ferry_object::{DirStore, ObjectError, S3Location, S3Settings, S3Store, Store};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const LARGE_BYTES: usize = 16 << 20;
const LARGE_OBJECTS: usize = 16;
const SMALL_OBJECTS: usize = 400;

fn main() -> Result<(), ObjectError> {
    let Some(target) = std::env::args().nth(1) else {
        eprintln!("usage: rate s3://BUCKET/PREFIX | DIRECTORY [small|large]");
        std::process::exit(2);
    };
    let env = Env::real();
    let store: Box<dyn Store> = if target.starts_with("s3://") {
        let location: S3Location = target.parse()?;
        Box::new(S3Store::open(&location, &S3Settings::from_environment(None)?, &env)?)
    } else {
        Box::new(DirStore::open(target.as_ref(), env.clone())?)
    };
    let prefix = format!("rate/{:016x}", env.entropy.next_u64());
    let bytes: Vec<u8> =
        (0..LARGE_BYTES as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let small = |kind: &str, length: usize, threads: usize| -> Result<(), ObjectError> {
        let name = |n| format!("{prefix}/{kind}/{n:06}");
        let begun = env.clock.monotonic();
        let mut times =
            parallel(&env, SMALL_OBJECTS, threads, |n| store.create(&name(n), &bytes[..length]))?;
        let all = env.clock.monotonic() - begun;
        times.sort_unstable();
        let at = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e3;
        println!(
            "create {:>3} KiB, {threads:>2} at a time: p50 {:.2} ms, p99 {:.2} ms, {:.0}/s",
            length >> 10,
            at(50),
            at(99),
            SMALL_OBJECTS as f64 / all.as_secs_f64()
        );
        parallel(&env, SMALL_OBJECTS, 8, |n| store.delete(&name(n))).map(drop)
    };
    let only = std::env::args().nth(2);
    let only_large = only.as_deref() == Some("large");
    if !only_large {
        small("a", 8 << 10, 1)?;
        if only.as_deref() == Some("small") {
            return Ok(());
        }
        small("b", 64 << 10, 1)?;
        small("c", 8 << 10, 16)?;
    }
    let threads: &[usize] = if only_large { &[8] } else { &[1, 8] };
    for &threads in threads {
        let name = |n| format!("{prefix}/large/{threads}-{n:03}");
        let rate = |what: &str, request: &(dyn Fn(usize) -> Result<(), ObjectError> + Sync)| {
            let begun = env.clock.monotonic();
            parallel(&env, LARGE_OBJECTS, threads, request)?;
            let secs = (env.clock.monotonic() - begun).as_secs_f64();
            let rate = (LARGE_BYTES * LARGE_OBJECTS) as f64 / 1e6 / secs;
            println!("{what:<5} 16 MiB, {threads:>2} at a time: {rate:.0} MB/s");
            Ok::<_, ObjectError>(())
        };
        rate("put", &|n| store.put(&name(n), &bytes))?;
        rate("range", &|n| {
            let found = store.get(&name(n), Some(0..LARGE_BYTES as u64))?;
            assert_eq!(found.len(), LARGE_BYTES, "it is read whole");
            Ok(())
        })?;
        parallel(&env, LARGE_OBJECTS, 8, |n| store.delete(&name(n)))?;
    }
    Ok(())
}

/// Makes requests with so many threads. The result is the time of each.
fn parallel(
    env: &Env,
    requests: usize,
    threads: usize,
    request: impl Fn(usize) -> Result<(), ObjectError> + Sync,
) -> Result<Vec<Duration>, ObjectError> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut times = Vec::new();
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= requests {
                return Ok(times);
            }
            let begun = env.clock.monotonic();
            request(n)?;
            times.push(env.clock.monotonic() - begun);
        }
    };
    let results: Vec<Result<Vec<_>, _>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    Ok(results.into_iter().collect::<Result<Vec<_>, _>>()?.concat())
}
