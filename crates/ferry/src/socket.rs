//! Questions to another process of this machine, over a Unix socket in the abstract namespace,
//! which leaves no file behind. The kernel identifies the peer. A question is a line, an answer is
//! JSON.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use ferry_env::Env;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Uid;
use serde_json::Value;

use crate::error::CliError;

/// The longest that either side waits for the other: a healthy process answers within milliseconds.
pub const TIME_MAX: Duration = Duration::from_secs(5);
/// Behind a connection that could not be taken.
const PAUSE: Duration = Duration::from_millis(100);
/// The most bytes of a question, which ends with a newline.
const QUESTION_MAX: usize = 64 << 10;
/// The most bytes of an answer: twice those of the longest, a list of the bytes of statistics.
const ANSWER_MAX: usize = 8 << 20;
/// The most questions answered at a time, if each has a thread.
const ASKING_MAX: usize = 16;
/// The most daemons that this process asks at a time.
const ASKED_AT_ONCE: usize = 16;

/// What a caller hears that may not ask.
const NOT_TRUSTED: &str = "only its own user and root may ask";

/// Answers questions under that name from now on, in a thread that lives as long as the process.
/// `answer` returns `None` for an unknown question.
pub fn answer(
    name: &str,
    answer: impl Fn(&str) -> Option<Value> + Send + 'static,
) -> io::Result<()> {
    take_each(name, move |question, stream| say(stream, answer(question)))
}

/// Gives `one` each question under that name from now on, with the connection of its caller, which
/// it answers.
pub fn take_each(
    name: &str,
    one: impl Fn(&str, UnixStream) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    listen(name, move |mut stream| {
        let question = line(&mut stream)?;
        one(&question, stream)
    })
}

/// As [`answer`], for questions that may take long: each has a thread of its own. `answer` also
/// gets the connection, to notice that its caller has hung up.
pub fn answer_each(
    name: &str,
    answer: impl Fn(&str, &UnixStream) -> Option<Value> + Send + Sync + 'static,
) -> io::Result<()> {
    // Each thread holds a reference, so the count is the number of questions.
    let answer = Arc::new(answer);
    listen(name, move |stream| {
        if Arc::strong_count(&answer) > ASKING_MAX {
            return say(stream, Some(object([("error", "too many ask at a time".into())])));
        }
        let answer = Arc::clone(&answer);
        let answering = move || {
            let mut stream = stream;
            let answered = line(&mut stream).and_then(|question| {
                let answer = answer(&question, &stream);
                say(stream, answer)
            });
            if let Err(error) = answered {
                tracing::debug!(%error, "a question of another process");
            }
        };
        std::thread::Builder::new().name("ferry-answer".into()).spawn(answering).map(drop)
    })
}

/// Gives `one` each connection of a caller that is trusted.
fn listen(
    name: &str,
    one: impl Fn(UnixStream) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    std::thread::Builder::new().name("ferry-control".into()).spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // As when no file can be opened: it would fail again at once.
                thread::park_timeout(PAUSE);
                continue;
            };
            let answered = bound(&stream).and_then(|()| match is_trusted(&stream)? {
                true => one(stream),
                false => say(stream, Some(object([("error", NOT_TRUSTED.into())]))),
            });
            if let Err(error) = answered {
                tracing::debug!(%error, "a question of another process");
            }
        }
    })?;
    Ok(())
}

/// Waits for so long; `true`: the other side has hung up.
pub fn hangs_up_within(stream: &UnixStream, time: Duration) -> bool {
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    // It asks for no event: only the end of the connection is told.
    let mut ended = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut ended, Some(&time)).is_ok_and(|count| count > 0)
}

/// Answers a question; `None`: it is unknown.
pub fn say(mut stream: UnixStream, answer: Option<Value>) -> io::Result<()> {
    let answer =
        answer.unwrap_or_else(|| object([("error", "another version of ferry asks".into())]));
    stream.write_all(answer.to_string().as_bytes())
}

/// The names with this prefix under which a process listens.
pub fn names(prefix: &str) -> Result<BTreeSet<String>, CliError> {
    let path = Path::new("/proc/net/unix");
    let table = std::fs::read(path).map_err(CliError::path(path, "cannot look for processes"))?;
    // Any user may bind any name, so it need not be UTF-8.
    let table = String::from_utf8_lossy(&table);
    let names = table.lines().filter_map(|line| line.rsplit_once(" @").map(|(_, name)| name));
    Ok(names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect())
}

/// Asks about each item what `ask` asks, of many at the same time: one that hangs does not hold up
/// the others. The answers are in the order of the items.
pub fn ask_each<T: Sync, A: Send>(items: &[T], ask: impl Fn(&T) -> A + Sync) -> Vec<A> {
    let ask_some = |some: &[T]| {
        thread::scope(|scope| {
            let asked: Vec<_> = some.iter().map(|item| scope.spawn(|| ask(item))).collect();
            let answer = |thread: ScopedJoinHandle<'_, A>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            asked.into_iter().map(answer).collect::<Vec<A>>()
        })
    };
    items.chunks(ASKED_AT_ONCE).flat_map(ask_some).collect()
}

/// Asks the process that listens under that name, if it belongs to this user or to root.
pub fn ask(name: &str, question: &str) -> io::Result<Value> {
    ask_on(connect(name)?, question)
}

/// Connects to the process that listens under that name, if it belongs to this user or to root.
fn connect(name: &str) -> io::Result<UnixStream> {
    connect_or_of(name, None)
}

/// As [`connect`]; root also trusts a process of `owner`.
pub fn connect_or_of(name: &str, owner: Option<u32>) -> io::Result<UnixStream> {
    let stream = connect_to_any(name)?;
    let is_owner = || {
        let peer = net::sockopt::socket_peercred(&stream)?.uid;
        Ok::<_, io::Error>(rustix::process::geteuid().is_root() && owner == Some(peer.as_raw()))
    };
    let trusted = is_trusted(&stream)? || is_owner()?;
    if trusted { Ok(stream) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Connects to the process that listens under that name, of any user.
fn connect_to_any(name: &str) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    // Another user's socket, whose queue is full, must not block this process.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    bound(&stream)?;
    Ok(stream)
}

/// Escapes the control characters in another process's text, which a terminal would obey.
pub fn printable(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut escaped, char| {
        if char.is_control() {
            escaped.extend(char.escape_default());
        } else {
            escaped.push(char);
        }
        escaped
    })
}

/// The process at the other end.
pub fn peer(stream: &UnixStream) -> Option<i32> {
    rustix::net::sockopt::socket_peercred(stream).ok().map(|peer| peer.pid.as_raw_nonzero().get())
}

/// The process that listens under that name, also if it is stopped or hangs, if it belongs to this
/// user or to root.
pub fn process(name: &str) -> Option<u32> {
    connect(name).ok().as_ref().and_then(peer).and_then(|pid| u32::try_from(pid).ok())
}

/// The user of the process that listens under that name. `None`: it has ended.
pub fn owner(name: &str) -> Option<Uid> {
    let stream = connect_to_any(name).ok()?;
    net::sockopt::socket_peercred(&stream).ok().map(|peer| peer.uid)
}

/// As [`ask`], for an answer that takes the other process at least `time`.
pub fn ask_for(name: &str, question: &str, time: Duration) -> io::Result<Value> {
    ask_on_for(connect(name)?, question, time)
}

/// As [`ask_on`], for an answer that takes the other process at least `time`.
pub fn ask_on_for(stream: UnixStream, question: &str, time: Duration) -> io::Result<Value> {
    stream.set_read_timeout(Some(TIME_MAX + time))?;
    ask_on(stream, question)
}

/// As [`ask`], for a question that may take long: waits for the answer, or until the other process
/// ends.
pub fn ask_patiently(name: &str, question: &str) -> io::Result<Value> {
    let stream = connect(name)?;
    stream.set_read_timeout(None)?;
    ask_on(stream, question)
}

/// Asks over a connection. An `errno` in the answer becomes this side's error; `PermissionDenied`:
/// the other side does not answer this user.
pub fn ask_on(mut stream: UnixStream, question: &str) -> io::Result<Value> {
    // A peer that refuses does not read the question: sending it may fail although the refusal
    // arrives.
    let asked =
        writeln!(stream, "{question}").and_then(|()| stream.shutdown(std::net::Shutdown::Write));
    let answer = whole(&mut stream)?;
    if answer.is_empty() {
        asked?;
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let answer: Value = serde_json::from_slice(&answer)?;
    match (
        answer["error"].as_str(),
        answer["errno"].as_i64().and_then(|errno| i32::try_from(errno).ok()),
    ) {
        (Some(NOT_TRUSTED), _) => Err(io::Error::new(io::ErrorKind::PermissionDenied, NOT_TRUSTED)),
        (Some(error), _) => Err(io::Error::other(printable(error))),
        (None, Some(errno)) => Err(io::Error::from_raw_os_error(errno)),
        (None, None) => Ok(answer),
    }
}

/// Reads an answer. The read timeout of the stream is the time limit of all of it, so that a peer
/// which sends a byte now and then does not hold this process up.
pub fn whole(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let clock = Env::real().clock;
    let end = stream.read_timeout()?.map(|time| clock.monotonic() + time);
    let (mut answer, mut part) = (Vec::new(), vec![0; QUESTION_MAX]);
    loop {
        if let Some(end) = end {
            let left = end.saturating_sub(clock.monotonic());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left))?;
        }
        match stream.read(&mut part) {
            Ok(0) => return Ok(answer),
            Ok(count) if answer.len() + count > ANSWER_MAX => {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            Ok(count) => answer.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A peer that refuses says why, and cuts the connection.
            Err(error) if answer.is_empty() || is_silence(&error) => return Err(error),
            Err(_) => return Ok(answer),
        }
    }
}

/// Whether an error means that the other process has not answered in time.
pub fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Whether an error means that the other process has ended before it answered.
pub fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset | UnexpectedEof)
}

/// A JSON object of these members.
pub fn object<const N: usize>(members: [(&str, Value); N]) -> Value {
    Value::from_iter(members)
}

/// Reads a question; returns it without its newline.
fn line(stream: &mut UnixStream) -> io::Result<String> {
    let mut bytes = Vec::new();
    stream.take(QUESTION_MAX as u64).read_to_end(&mut bytes)?;
    let text = String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData)?;
    text.strip_suffix('\n').map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn bound(stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(TIME_MAX))?;
    stream.set_write_timeout(Some(TIME_MAX))
}

/// Whether root or this process's own user is at the other end.
fn is_trusted(stream: &UnixStream) -> io::Result<bool> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?.uid;
    Ok(peer.is_root() || peer == rustix::process::geteuid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn many_are_asked_at_the_same_time_and_answer_in_their_order() {
        let barrier = Barrier::new(ASKED_AT_ONCE);
        let items: Vec<usize> = (0..2 * ASKED_AT_ONCE).collect();
        // One of them alone would wait for ever.
        let answers = ask_each(&items, |item| {
            barrier.wait();
            item + 1
        });
        assert_eq!(answers, (1..=2 * ASKED_AT_ONCE).collect::<Vec<_>>());
        assert_eq!(ask_each(&[], |_: &u8| ()), []);
    }

    #[test]
    fn a_refusal_of_this_user_is_told_from_other_errors() {
        let asked = |said: &str| {
            let (ours, mut peer) = UnixStream::pair().expect("a pair of sockets");
            peer.write_all(object([("error", said.into())]).to_string().as_bytes()).expect("room");
            drop(peer);
            ask_on(ours, "stats").expect_err("that is no answer").kind()
        };
        assert_eq!(asked(NOT_TRUSTED), io::ErrorKind::PermissionDenied);
        assert_eq!(asked("too many ask at a time"), io::ErrorKind::Other);
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("a \u{1b}[2J\n\u{9b}é\"'"), "a \\u{1b}[2J\\n\\u{9b}é\"'");
    }

    /// How an answer ends that a peer sends in 100 parts like this one.
    fn asked_of_a_peer_that_sends(part: &'static [u8], pause: Duration) -> io::Error {
        let (ours, mut peer) = UnixStream::pair().expect("a pair of sockets");
        ours.set_read_timeout(Some(Duration::from_millis(300))).expect("not zero");
        let sending = std::thread::spawn(move || {
            let (_hold, bell) = std::sync::mpsc::channel::<()>();
            for _ in 0..100 {
                let heard = peer.write_all(part);
                if heard.is_err() {
                    break;
                }
                let _ = bell.recv_timeout(pause);
            }
        });
        let error = ask_on(ours, "stats").expect_err("it is no JSON");
        sending.join().expect("the reader has hung up");
        error
    }

    #[test]
    fn the_time_limit_is_that_of_the_whole_answer() {
        let error = asked_of_a_peer_that_sends(b" ", Duration::from_millis(30));
        assert!(is_silence(&error), "{error}");
    }

    #[test]
    fn an_answer_without_end_is_refused() {
        let error = asked_of_a_peer_that_sends(&[b' '; 1 << 20], Duration::ZERO);
        assert!(is_silence(&error) || error.kind() == io::ErrorKind::FileTooLarge, "{error}");
    }
}
