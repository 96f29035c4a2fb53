//! What commands that take long have in common: a progress bar, a pause, and the end by a signal.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferry_env::Env;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::event::{Timespec, poll};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::CliError;

/// The longest pause; then the caller looks again.
pub const PAUSE_MAX: Duration = Duration::from_millis(200);

/// A progress bar in this form; hidden if stderr is no terminal.
pub fn progress_bar(template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A flag that SIGINT (Ctrl-C) and SIGTERM set.
pub fn stop_on_signals() -> Result<Arc<AtomicBool>, CliError> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())
            .map_err(|e| CliError::Failed(format!("cannot handle signals: {e}")))?;
    }
    Ok(stop)
}

/// The same; a second signal ends the process as if nothing handled it. For what may take long
/// before it looks at the flag, and can be cut off anywhere.
pub fn stop_on_signals_or_end() -> Result<Arc<AtomicBool>, CliError> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag not set yet.
        signal_hook::flag::register_conditional_default(signal, stop.clone())
            .and_then(|_| signal_hook::flag::register(signal, stop.clone()))
            .map_err(|e| CliError::Failed(format!("cannot handle signals: {e}")))?;
    }
    Ok(stop)
}

/// Whether what asks now and then goes on.
pub fn go_on(stop: &AtomicBool) -> ControlFlow<()> {
    match stop.load(Ordering::Relaxed) {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    }
}

/// Waits for the given time, at most [`PAUSE_MAX`], or until a signal arrives.
pub fn pause(time: Duration) {
    // It watches no descriptor: it ends with the time or with a signal, and both are fine.
    let _ = poll(&mut [], Some(&timespec(time.min(PAUSE_MAX))));
}

/// A time as poll(2) takes it.
pub fn timespec(time: Duration) -> Timespec {
    let tv_sec = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: time.subsec_nanos().into() }
}

/// Waits for the given time, until a signal has set `stop`: then the answer is `false`.
pub fn wait(time: Duration, stop: &AtomicBool) -> bool {
    let clock = Env::real().clock;
    let until = clock.monotonic() + time;
    loop {
        let left = until.saturating_sub(clock.monotonic());
        if stop.load(Ordering::Relaxed) || left.is_zero() {
            return !stop.load(Ordering::Relaxed);
        }
        // A signal may arrive between the check of the flag and the pause: it is noticed after the
        // pause.
        pause(left);
    }
}
