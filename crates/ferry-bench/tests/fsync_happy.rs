//! The flush policies in virtual time: counts of flushes and times are exact, the same in every
//! run.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_bench::workload::fsync_happy::{Cell, DeviceModel, Load};
use ferry_journal::{FAST_FLUSH, FlushPolicy};
use std::time::Duration;

const WRITE: Duration = Duration::from_micros(20);

fn device(flush_time: Duration, serial_flushes: bool) -> DeviceModel {
    DeviceModel { flush_time, write_time: WRITE, queue_depth: 128, serial_flushes }
}

fn cell(device: DeviceModel, load: Load) -> Cell {
    Cell::run(device, load, &FlushPolicy::ALL, FAST_FLUSH).unwrap()
}

fn grid() -> impl Iterator<Item = (Duration, u32, bool)> {
    let times = [Duration::from_millis(16), Duration::from_micros(50)];
    let callers = [1, 2, 16];
    let cells = times.into_iter().flat_map(move |time| callers.into_iter().map(move |n| (time, n)));
    cells.flat_map(|(time, n)| [(time, n, true), (time, n, false)])
}

#[test]
fn adaptive_is_as_good_as_the_best_and_a_lone_caller_never_waits() {
    for (flush_time, callers, serial) in grid() {
        let cell = cell(device(flush_time, serial), Load::eager(callers));
        let (adaptive, each) =
            (cell.of(FlushPolicy::Adaptive).unwrap(), cell.of(FlushPolicy::Each).unwrap());
        let what = format!("{flush_time:?}, {callers} callers, serial {serial}: {cell:?}");
        assert!(adaptive.rate() >= 0.98 * cell.best(), "{what}");
        if callers == 1 {
            assert!(adaptive.rate() >= 0.98 * each.rate(), "{what}");
            assert_eq!(adaptive.holds, 0, "POLICY-2: {what}");
        }
    }
}

/// Every flush serves all callers: a commit takes one write and one flush.
#[test]
fn eager_callers_share_every_flush() {
    for callers in [2, 16] {
        let time = Duration::from_millis(2);
        let cell = cell(device(time, true), Load::eager(callers));
        let adaptive = cell.of(FlushPolicy::Adaptive).unwrap();
        assert_eq!(adaptive.fsyncs, adaptive.flushes * u64::from(callers));
        assert_eq!(adaptive.time, (time + WRITE) * u32::try_from(adaptive.flushes).unwrap());
        assert_eq!(adaptive.holds_in_vain, 0);
        let each = cell.of(FlushPolicy::Each).unwrap();
        assert_eq!(each.flushes, each.fsyncs, "a flush for each");
        assert_eq!(each.time, time * u32::try_from(each.flushes).unwrap(), "one after the other");
    }
}

#[test]
fn sixteen_callers_at_16_ms_are_ten_times_as_fast_with_a_tenth_of_the_flushes() {
    let cell = cell(device(Duration::from_millis(16), true), Load::eager(16));
    let (adaptive, each) =
        (cell.of(FlushPolicy::Adaptive).unwrap(), cell.of(FlushPolicy::Each).unwrap());
    assert!(adaptive.rate() >= 10.0 * each.rate(), "{cell:?}");
    assert!(adaptive.flushes * 10 <= each.flushes, "{cell:?}");
}

/// `delay` waits as long as a flush takes, unless flushes are fast or the caller is alone.
#[test]
fn delay_waits_for_company_only_where_flushes_are_slow() {
    let time = Duration::from_millis(16);
    let load = Load { callers: 4, think_time: Duration::ZERO, jitter: 4 * time };
    let slow = cell(device(time, true), load);
    assert!(slow.of(FlushPolicy::Delay).unwrap().holds > 0);
    let fast = cell(device(Duration::from_millis(1), true), Load::eager(8));
    assert_eq!(fast.of(FlushPolicy::Delay), fast.of(FlushPolicy::Gather));
    let alone = cell(device(time, true), Load::eager(1));
    assert_eq!(alone.of(FlushPolicy::Delay).unwrap().holds, 0);
}

/// Callers who cannot be relied upon are not waited for: `adaptive` loses next to nothing to
/// `gather`.
#[test]
fn holds_in_vain_cost_little() {
    for callers in [2, 8, 16] {
        let flush_time = Duration::from_millis(2);
        let load = Load { callers, think_time: Duration::ZERO, jitter: 2 * flush_time };
        let cell = cell(device(flush_time, true), load);
        let (adaptive, gather) =
            (cell.of(FlushPolicy::Adaptive).unwrap(), cell.of(FlushPolicy::Gather).unwrap());
        assert!(adaptive.rate() >= 0.95 * gather.rate(), "{cell:?}");
    }
}

/// Where two callers take about as long as a fast flush to come back, flushes follow each other:
/// `adaptive` is as good as `each`.
#[test]
fn two_callers_with_pauses_keep_a_fast_device_busy() {
    let flush_time = Duration::from_micros(50);
    for jitter in [flush_time, flush_time * 3 / 2, flush_time * 2] {
        let cell =
            cell(device(flush_time, true), Load { callers: 2, think_time: Duration::ZERO, jitter });
        let (adaptive, each) =
            (cell.of(FlushPolicy::Adaptive).unwrap(), cell.of(FlushPolicy::Each).unwrap());
        assert!(adaptive.rate() >= 0.97 * each.rate(), "{jitter:?}: {cell:?}");
    }
}

#[test]
fn a_run_repeats_itself() {
    let load = Load { callers: 8, think_time: WRITE, jitter: WRITE };
    let run = || cell(device(Duration::from_micros(500), true), load.clone()).outcomes;
    assert_eq!(run(), run());
}
