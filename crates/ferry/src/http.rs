//! A server of pages over HTTP that are only read, in one thread. A connection has a bounded time
//! in all, takes bounded memory, and is never waited for: a slow or hostile client holds up no
//! other one.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ferry_env::Clock;
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

/// A request to read something.
pub struct Request<'a> {
    pub path: &'a str,
    /// What follows the `?`, as it was sent.
    pub query: &'a str,
    headers: Vec<(&'a str, &'a str)>,
}

impl<'a> Request<'a> {
    /// A request for `target`, a path with or without a query.
    pub fn of(target: &'a str, headers: &[(&'a str, &'a str)]) -> Self {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        Self { path, query, headers: headers.to_vec() }
    }

    /// The value of a header that the request has exactly once.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        let mut values = self.headers.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name));
        match (values.next(), values.next()) {
            (Some((_, value)), None) => Some(value),
            _ => None,
        }
    }
}

/// What a request is answered with.
pub struct Response {
    /// The status code and its words.
    pub status: &'static str,
    pub content_type: &'static str,
    /// Further headers, each with the end of its line.
    pub headers: &'static str,
    pub body: String,
}

/// The type of plain text.
pub const TEXT: &str = "text/plain; charset=utf-8";

impl Response {
    /// An answer that says why there is no other.
    pub fn refusal(status: &'static str, why: &str) -> Self {
        Self { status, content_type: TEXT, headers: "", body: format!("{why}\n") }
    }

    /// `head`: without the body, as HEAD asks for.
    fn into_bytes(self, head: bool) -> Vec<u8> {
        let Self { status, content_type, headers, body } = self;
        let len = body.len();
        let body = if head { "" } else { &body };
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len}\r\n{headers}Connection: close\r\n\r\n{body}"
        )
        .into_bytes()
    }
}

/// Serves `pages` until the other end of `stopped`, a pipe, is closed.
pub fn serve(
    listener: &OwnedFd,
    stopped: BorrowedFd<'_>,
    clock: &dyn Clock,
    pages: impl Fn(&Request<'_>) -> Response,
) {
    if let Err(error) = ioctl_fionbio(listener, true) {
        return tracing::warn!(%error, "nothing is served over HTTP");
    }
    let mut open = VecDeque::<Connection>::new();
    loop {
        match ready([stopped, listener.as_fd()], &open, clock.monotonic()) {
            Ok(([true, _], _)) => return,
            Ok(([_, arrives], movable)) => {
                let mut movable = movable.into_iter();
                open.retain_mut(|one| !movable.next().unwrap_or(false) || one.go_on(&pages));
                if arrives {
                    accept(listener, &mut open, clock.monotonic());
                }
            }
            Err(Errno::INTR) => {}
            Err(error) => return tracing::warn!(%error, "nothing is served over HTTP any more"),
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
            tracing::debug!(%error, "a client cannot be accepted");
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
    fn go_on(&mut self, pages: impl Fn(&Request<'_>) -> Response) -> bool {
        let moved = if self.answer.is_empty() { self.read(pages) } else { self.write() };
        match moved {
            Ok(goes_on) => goes_on,
            Err(Errno::AGAIN | Errno::INTR) => true,
            Err(_) => false,
        }
    }

    fn read(&mut self, pages: impl Fn(&Request<'_>) -> Response) -> Result<bool, Errno> {
        let mut bytes = [0; 2 << 10];
        let (got, _) = recv(&self.socket, &mut bytes, RecvFlags::empty())?;
        self.request.extend_from_slice(&bytes[..got]);
        if self.request.windows(4).any(|end| end == b"\r\n\r\n") {
            self.answer = answer(&self.request, pages);
        } else if self.request.len() > REQUEST_MAX {
            let refusal = Response::refusal("431 Request Header Fields Too Large", "too long");
            self.answer = refusal.into_bytes(false);
        }
        Ok(got > 0)
    }

    fn write(&mut self) -> Result<bool, Errno> {
        self.sent += send(&self.socket, &self.answer[self.sent..], SendFlags::NOSIGNAL)?;
        Ok(self.sent < self.answer.len())
    }
}

/// The answer to a request.
fn answer(request: &[u8], pages: impl Fn(&Request<'_>) -> Response) -> Vec<u8> {
    let mut lines = str::from_utf8(request).unwrap_or_default().split("\r\n");
    let words: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else {
        return Response::refusal("400 Bad Request", "this is no request of HTTP/1")
            .into_bytes(false);
    };
    let head = method == "HEAD";
    let response = if !version.starts_with("HTTP/1.") {
        Response::refusal("505 HTTP Version Not Supported", "HTTP/1.1 is spoken")
    } else if method != "GET" && !head {
        let refusal = Response::refusal("405 Method Not Allowed", "figures are only read");
        Response { headers: "Allow: GET, HEAD\r\n", ..refusal }
    } else {
        let headers = lines.filter_map(|line| line.split_once(':'));
        let headers: Vec<_> = headers.map(|(name, value)| (name, value.trim())).collect();
        pages(&Request::of(target, &headers))
    };
    response.into_bytes(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(request: &str) -> String {
        let page = |request: &Request<'_>| {
            let body = format!("{:?} {:?}", request.header("HOST"), request.query);
            Response { status: "200 OK", content_type: TEXT, headers: "", body }
        };
        String::from_utf8(answer(request.as_bytes(), page)).expect("text")
    }

    #[test]
    fn pages_are_only_read() {
        for (request, status) in [
            ("GET /metrics HTTP/1.1", "200 OK"),
            ("GET /metrics?name=a HTTP/1.0", "200 OK"),
            ("POST /metrics HTTP/1.1", "405 Method Not Allowed"),
            ("OPTIONS * HTTP/1.1", "405 Method Not Allowed"),
            ("GET /metrics HTTP/2.0", "505 HTTP Version Not Supported"),
            ("GET /metrics", "400 Bad Request"),
            ("\u{0}\u{ff}", "400 Bad Request"),
            ("", "400 Bad Request"),
        ] {
            let answer = said(&format!("{request}\r\nHost: a\r\n\r\n"));
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request}: {answer}");
        }
        let head = said("HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(head.contains("Content-Length: 7\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    }

    #[test]
    fn a_header_that_is_given_twice_counts_as_none() {
        let host = |lines: &str| said(&format!("GET /?a=b HTTP/1.1\r\n{lines}\r\n\r\n"));
        assert!(host("A: b\r\nhost:  a:1 ").ends_with("Some(\"a:1\") \"a=b\""));
        assert!(host("Host: a\r\nHOST: b").ends_with("None \"a=b\""));
        assert!(host("Host").ends_with("None \"a=b\""));
    }
}
