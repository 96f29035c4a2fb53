//! A server of one page over HTTP, in one thread. A connection has a bounded time in all, takes
//! bounded memory, and is never waited for: a slow or hostile client holds up no other one.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ferry_env::Clock;
use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send};

use crate::waiting::{PAUSE_MAX, pause};

/// The most connections at a time. A further one takes the slot of the oldest.
const CONNECTIONS_MAX: usize = 8;
/// How long a connection may take from its first byte to its last.
const TIME_MAX: Duration = Duration::from_secs(5);
/// The most bytes of a request, with its headers.
const REQUEST_MAX: usize = 8 << 10;
/// The path of the page.
const PATH: &str = "/metrics";

/// Serves `page` until the other end of `stopped`, a pipe, is closed. `page` returns `None` when
/// there is nothing to show.
pub fn serve(
    listener: &OwnedFd,
    stopped: BorrowedFd<'_>,
    clock: &dyn Clock,
    page: impl Fn() -> Option<String>,
) {
    if let Err(error) = ioctl_fionbio(listener, true) {
        return tracing::warn!(%error, "metrics are not served");
    }
    let mut open = VecDeque::<Connection>::new();
    loop {
        match ready([stopped, listener.as_fd()], &open, clock.monotonic()) {
            Ok(([true, _], _)) => return,
            Ok(([_, arrives], movable)) => {
                let mut movable = movable.into_iter();
                open.retain_mut(|one| !movable.next().unwrap_or(false) || one.go_on(&page));
                if arrives {
                    accept(listener, &mut open, clock.monotonic());
                }
            }
            Err(Errno::INTR) => {}
            Err(error) => return tracing::warn!(%error, "metrics are served no more"),
        }
        let now = clock.monotonic();
        open.retain(|one| now < one.end);
    }
}

/// Waits until one of `first` can be read, or a connection can go on or has had its time. Which of
/// them can go on.
fn ready<const N: usize>(
    first: [BorrowedFd<'_>; N],
    open: &VecDeque<Connection>,
    now: Duration,
) -> Result<([bool; N], Vec<bool>), Errno> {
    let mut waited: Vec<PollFd<'_>> =
        first.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).into();
    waited.extend(open.iter().map(|one| {
        PollFd::new(&one.socket, if one.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT })
    }));
    // They end in the order in which they arrived.
    let left = open.front().map(|oldest| oldest.end.saturating_sub(now));
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    poll(&mut waited, left.as_ref())?;
    let mut ready = waited.iter().map(|one| !one.revents().is_empty());
    Ok(([(); N].map(|()| ready.next().unwrap_or(false)), ready.collect()))
}

fn accept(listener: &OwnedFd, open: &mut VecDeque<Connection>, now: Duration) {
    match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => {
            if open.len() == CONNECTIONS_MAX {
                open.pop_front();
            }
            let (request, answer) = (Vec::new(), Vec::new());
            open.push_back(Connection { socket, end: now + TIME_MAX, request, answer, sent: 0 });
        }
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
        Err(error) => {
            // No descriptor is free, for example. The client would be polled for again at once.
            tracing::debug!(%error, "a scraper cannot be accepted");
            pause(PAUSE_MAX);
        }
    }
}

struct Connection {
    socket: OwnedFd,
    /// When it is closed, on the monotonic clock.
    end: Duration,
    request: Vec<u8>,
    /// Empty until the request is complete.
    answer: Vec<u8>,
    sent: usize,
}

impl Connection {
    /// Reads or writes once. `false`: it is over.
    fn go_on(&mut self, page: impl Fn() -> Option<String>) -> bool {
        let moved = if self.answer.is_empty() { self.read(page) } else { self.write() };
        match moved {
            Ok(goes_on) => goes_on,
            Err(Errno::AGAIN | Errno::INTR) => true,
            Err(_) => false,
        }
    }

    fn read(&mut self, page: impl Fn() -> Option<String>) -> Result<bool, Errno> {
        let mut bytes = [0; 2 << 10];
        let (got, _) = recv(&self.socket, &mut bytes, RecvFlags::empty())?;
        self.request.extend_from_slice(&bytes[..got]);
        if self.request.windows(4).any(|end| end == b"\r\n\r\n") {
            self.answer = answer(&self.request, page);
        } else if self.request.len() > REQUEST_MAX {
            self.answer = response("431 Request Header Fields Too Large", "", "too long\n", false);
        }
        Ok(got > 0)
    }

    fn write(&mut self) -> Result<bool, Errno> {
        self.sent += send(&self.socket, &self.answer[self.sent..], SendFlags::NOSIGNAL)?;
        Ok(self.sent < self.answer.len())
    }
}

/// The answer to a request, whose headers do not matter.
fn answer(request: &[u8], page: impl Fn() -> Option<String>) -> Vec<u8> {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let words: Vec<&str> = str::from_utf8(line).unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else {
        return response("400 Bad Request", "", "this is no request of HTTP/1\n", false);
    };
    let head = method == "HEAD";
    if !version.starts_with("HTTP/1.") {
        return response("505 HTTP Version Not Supported", "", "HTTP/1.1 is spoken\n", head);
    }
    if method != "GET" && !head {
        let allow = "Allow: GET, HEAD\r\n";
        return response("405 Method Not Allowed", allow, "figures are only read\n", false);
    }
    if target.split('?').next() != Some(PATH) {
        return response("404 Not Found", "", "the figures are at /metrics\n", head);
    }
    match page() {
        Some(text) => response("200 OK", "", &text, head),
        None => response("503 Service Unavailable", "", "it is being closed\n", head),
    }
}

/// `head`: without the body, as HEAD asks for.
fn response(status: &str, more: &str, body: &str, head: bool) -> Vec<u8> {
    let kind = if status.starts_with("200") { CONTENT_TYPE } else { "text/plain; charset=utf-8" };
    let len = body.len();
    let body = if head { "" } else { body };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\n{more}Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_page_is_served_and_only_to_be_read() {
        for (request, status) in [
            ("GET /metrics HTTP/1.1", "200 OK"),
            ("GET /metrics?name=a HTTP/1.0", "200 OK"),
            ("GET / HTTP/1.1", "404 Not Found"),
            ("GET /metrics/../etc HTTP/1.1", "404 Not Found"),
            ("POST /metrics HTTP/1.1", "405 Method Not Allowed"),
            ("GET /metrics HTTP/2.0", "505 HTTP Version Not Supported"),
            ("GET /metrics", "400 Bad Request"),
            ("\u{0}\u{ff}", "400 Bad Request"),
            ("", "400 Bad Request"),
        ] {
            let request = format!("{request}\r\nHost: a\r\n\r\n");
            let answer = answer(request.as_bytes(), || Some("page\n".into()));
            let answer = String::from_utf8(answer).expect("text");
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request}: {answer}");
        }
        let head = answer(b"HEAD /metrics HTTP/1.1\r\n\r\n", || Some("page\n".into()));
        let head = String::from_utf8(head).expect("text");
        assert!(head.contains("Content-Length: 5\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        let ended = answer(b"GET /metrics HTTP/1.1\r\n\r\n", || None);
        assert!(ended.starts_with(b"HTTP/1.1 503 "));
    }
}
