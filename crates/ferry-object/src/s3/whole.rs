//! Requests with a short body go to the socket as a whole.
//!
//! `ureq` writes the head of a request, and then its body. A process that is stopped between the
//! two, or a machine that dies there, leaves half of an object at the store. Some stores lock the
//! name until they give such a request up: `MinIO` for 30 s, in which nobody can follow the log or
//! fence its owner off. Besides, one write is cheaper than two.

use ureq::Error;
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, NextTimeout, Transport};

/// Makes [`Whole`] of the connections of the connectors before it.
#[derive(Debug)]
pub(super) struct SendsWhole;

impl<In: Transport> Connector<In> for SendsWhole {
    type Out = Whole<In>;

    fn connect(
        &self,
        _details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        Ok(chained.map(|inner| Whole { inner, head: Vec::new() }))
    }
}

/// A connection that holds the head of a request back until its body comes.
#[derive(Debug)]
pub(super) struct Whole<T> {
    inner: T,
    head: Vec<u8>,
}

impl<T: Transport> Whole<T> {
    /// Sends the head, and the bytes that are in the output behind it.
    fn send(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let head = std::mem::take(&mut self.head);
        let output = self.inner.buffers().output();
        output.copy_within(..amount, head.len());
        output[..head.len()].copy_from_slice(&head);
        self.inner.transmit_output(head.len() + amount, timeout)
    }
}

impl<T: Transport> Transport for Whole<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.inner.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        if self.head.is_empty() {
            let output = self.inner.buffers().output();
            if body_bytes(&output[..amount]).is_some_and(|body| body <= output.len() - amount) {
                self.head.extend_from_slice(&output[..amount]);
                return Ok(());
            }
        }
        self.send(amount, timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        if !self.head.is_empty() {
            self.send(0, timeout)?;
        }
        self.inner.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.inner.is_open()
    }

    fn is_tls(&self) -> bool {
        self.inner.is_tls()
    }
}

/// The bytes of the body that follows at once, if this is the head of a request with one.
fn body_bytes(head: &[u8]) -> Option<usize> {
    let head = std::str::from_utf8(head).ok()?;
    let mut lines = head.strip_suffix("\r\n\r\n")?.split("\r\n");
    lines.next().filter(|line| line.starts_with("PUT "))?;
    let mut length = None;
    for line in lines {
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("expect") {
            return None;
        }
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok();
        }
    }
    length.filter(|length| *length > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_head_of_a_request_with_a_body_that_follows_at_once_is_held_back() {
        let head = |line: &str, more: &str| format!("{line} HTTP/1.1\r\nhost: box\r\n{more}\r\n");
        let of = |line: &str, more: &str| body_bytes(head(line, more).as_bytes());
        assert_eq!(of("PUT /a", "Content-Length: 12\r\n"), Some(12));
        assert_eq!(of("PUT /a", "content-length: 0\r\n"), None);
        assert_eq!(of("PUT /a", "content-length: 12\r\nexpect: 100-continue\r\n"), None);
        assert_eq!(of("PUT /a", ""), None);
        assert_eq!(of("GET /a", "content-length: 12\r\n"), None);
        assert_eq!(body_bytes(b"PUT /a HTTP/1.1\r\ncontent-length: 12\r\n"), None, "half of it");
        assert_eq!(body_bytes(&[0xff; 10]), None);
    }
}
