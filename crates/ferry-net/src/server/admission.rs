//! Admission: connections whose client has not sent its greeting yet, nor shown a certificate where
//! one is needed.
//!
//! * GREETING-1: there are at most [`NEWCOMERS_MAX`] of them, and [`NEWCOMERS_OF_ADDRESS_MAX`] from
//!   one address. For one more the oldest is closed: of the same address if that has too many, else
//!   of all. So a client that only connects keeps no other client out.
//! * GREETING-2: a client that has sent its greeting has a slot of its own, and is never closed for
//!   a newcomer.

use crate::rt::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::rt::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Connections before their greeting at the same time.
const NEWCOMERS_MAX: usize = 512;
/// Of these from one address.
const NEWCOMERS_OF_ADDRESS_MAX: usize = 128;
/// Connections after their greeting at the same time.
const CONNECTIONS_MAX: usize = 2048;

struct Waiting {
    number: u64,
    from: IpAddr,
    leave: Arc<Notify>,
}

/// The admission of a server.
pub(super) struct Admission {
    /// Oldest first, and the number of all so far.
    waiting: Mutex<(VecDeque<Waiting>, u64)>,
    inside: Arc<Semaphore>,
}

impl Default for Admission {
    fn default() -> Self {
        Self { waiting: Mutex::default(), inside: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

/// A connection before its greeting, until it is admitted or this is dropped.
pub(super) struct Newcomer {
    admission: Arc<Admission>,
    number: u64,
    /// Its address.
    pub(super) from: SocketAddr,
}

/// The addresses of a network that one machine usually has count as one.
fn site(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() >> 64 << 64).into()),
        v4 => v4,
    }
}

impl Admission {
    /// A connection has come. It must be closed when the other value says so.
    pub(super) fn arrive(self: &Arc<Self>, from: SocketAddr) -> (Newcomer, Arc<Notify>) {
        let (site, leave) = (site(from.ip()), Arc::new(Notify::new()));
        let mut waiting = self.waiting.lock();
        let (all, numbers) = &mut *waiting;
        *numbers += 1;
        let number = *numbers;
        let of_site = all.iter().filter(|other| other.from == site).count();
        let oldest = if of_site >= NEWCOMERS_OF_ADDRESS_MAX {
            all.iter().position(|other| other.from == site)
        } else {
            (all.len() >= NEWCOMERS_MAX).then_some(0)
        };
        if let Some(closed) = oldest.and_then(|at| all.remove(at)) {
            closed.leave.notify_one();
        }
        all.push_back(Waiting { number, from: site, leave: Arc::clone(&leave) });
        (Newcomer { admission: Arc::clone(self), number, from }, leave)
    }

    fn remove(&self, number: u64) -> bool {
        let all = &mut self.waiting.lock().0;
        let at = all.binary_search_by_key(&number, |other| other.number);
        at.is_ok_and(|at| all.remove(at).is_some())
    }
}

impl Newcomer {
    /// The greeting has come: a slot, if there is one and the connection is not being closed.
    pub(super) fn admit(self) -> Option<OwnedSemaphorePermit> {
        let stays = self.admission.remove(self.number);
        Arc::clone(&self.admission.inside).try_acquire_owned().ok().filter(|_| stays)
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.admission.remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn from(site: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, site], port))
    }

    fn must_go(leave: &Notify) -> bool {
        pin!(leave.notified()).as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn the_oldest_newcomer_of_a_full_address_is_closed_for_its_next() {
        let admission = Arc::new(Admission::default());
        let (other, stays) = admission.arrive(from(2, 1));
        let arrive = |n| admission.arrive(from(1, n));
        let mut crowd: Vec<_> = (0..NEWCOMERS_OF_ADDRESS_MAX as u16).map(arrive).collect();
        assert!(!crowd.iter().any(|(_, leave)| must_go(leave)));
        let (next, leave) = arrive(999);
        assert!(
            must_go(&crowd[0].1) && !must_go(&crowd[1].1) && !must_go(&leave) && !must_go(&stays)
        );
        let (closed, _) = crowd.remove(0);
        assert!(closed.admit().is_none(), "it is too late");
        assert!(next.admit().is_some() && other.admit().is_some());
        // A connection that is admitted or closed makes room.
        drop(crowd);
        assert!(admission.waiting.lock().0.is_empty());
    }

    #[test]
    fn newcomers_of_many_addresses_keep_no_client_out() {
        let admission = Arc::new(Admission::default());
        let mut inside = Vec::new();
        let mut crowd = Vec::new();
        for n in 0..4 * NEWCOMERS_MAX {
            let site = (n % 200) as u8;
            crowd.push(admission.arrive(from(site, n as u16)));
            if n % 8 == 0 {
                let (client, leave) = admission.arrive(from(201, n as u16));
                assert!(!must_go(&leave));
                inside.push(client.admit().expect("there is room inside"));
            }
        }
        let closed = crowd.iter().filter(|(_, leave)| must_go(leave)).count();
        assert!(closed >= 3 * NEWCOMERS_MAX && admission.waiting.lock().0.len() <= NEWCOMERS_MAX);
    }

    #[test]
    fn a_network_of_one_machine_counts_as_one_address() {
        let ip = |text: &str| site(text.parse().expect(text));
        assert_eq!(ip("2001:db8::1"), ip("2001:db8::ffff:2"));
        assert_ne!(ip("2001:db8::1"), ip("2001:db8:0:1::1"));
        assert_eq!(ip("::ffff:10.0.0.1"), ip("10.0.0.1"));
        assert_ne!(ip("10.0.0.1"), ip("10.0.0.2"));
    }
}
