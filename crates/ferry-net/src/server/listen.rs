//! How connections come in: accepted, greeted with TLS or without, and handed to `connection`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::admission::Newcomer;
use super::connection;
use super::core::{Core, Stage};
use crate::error::NetError;
use crate::frame::Stream;
use crate::limits::Peer;
use crate::message::ToClient;
use crate::refusal::{Cause, Refusal};
use crate::tls::{self, ServerTls};

/// The longest time for a TLS handshake.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// A client that is refused has so long to read why and to hang up.
const LAST_MESSAGE_TIME_MAX: Duration = Duration::from_secs(1);
/// How often the server looks whether the rest of a greeting has arrived.
const PEEK_INTERVAL: Duration = Duration::from_millis(5);

/// Connections that may wait to be accepted: clients come all at once when a server starts again.
const BACKLOG: i32 = 1024;

/// An address that this process has taken.
#[derive(Debug)]
pub struct Bound {
    addr: SocketAddr,
    listener: std::net::TcpListener,
}

impl Bound {
    /// Takes the address; port 0 chooses a port. Clients that connect wait until a server serves
    /// it.
    pub fn new(addr: SocketAddr) -> Result<Self, NetError> {
        let bound = Self::reserve(addr)?;
        bound.listen()?;
        Ok(bound)
    }

    /// The same; clients that connect are refused until a server serves it.
    pub fn reserve(addr: SocketAddr) -> Result<Self, NetError> {
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let bound = || {
            let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
            // The address of a server that has just ended is free.
            net::sockopt::set_socket_reuseaddr(&socket, true)?;
            net::bind(&socket, &addr)?;
            let listener = std::net::TcpListener::from(socket);
            Ok(Self { addr: listener.local_addr()?, listener })
        };
        bound().map_err(|error| NetError::Listen { addr, error })
    }

    fn listen(&self) -> Result<(), NetError> {
        net::listen(&self.listener, BACKLOG)
            .map_err(|error| NetError::Listen { addr: self.addr, error: error.into() })
    }

    /// With the port that was chosen.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// For the runtime of the caller, which watches it.
    pub(super) async fn watched(self) -> Result<TcpListener, NetError> {
        self.listen()?;
        let Self { addr, listener } = self;
        TcpListener::from_std(listener).map_err(|error| NetError::Listen { addr, error })
    }
}

pub(super) async fn accept(core: Arc<Core>, listener: TcpListener, tls: Option<ServerTls>) {
    let mut stopping = core.stopping.subscribe();
    loop {
        let accepted = crate::rt::select! {
            accepted = listener.accept() => accepted,
            () = Stage::Draining.reached(&mut stopping) => return,
        };
        match accepted {
            Ok((stream, from)) => {
                let (newcomer, leave) = core.admission.arrive(from);
                let served = serve(Arc::clone(&core), stream, tls.clone(), newcomer);
                crate::rt::spawn(async move {
                    crate::rt::select! {
                        () = served => {}
                        () = leave.notified() => {
                            tracing::info!(%from, "hung up: it had said nothing, and others came");
                        }
                    }
                });
            }
            Err(error) => {
                // Mostly there are no descriptors left: the existing connections go on.
                tracing::warn!(%error, "cannot accept a connection");
                crate::rt::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(core: Arc<Core>, stream: TcpStream, tls: Option<ServerTls>, newcomer: Newcomer) {
    let from = newcomer.from;
    let greeted = crate::rt::time::timeout(HANDSHAKE_TIME_MAX, greet(stream, tls)).await;
    match greeted.unwrap_or_else(|_| Err(Unheard::Ended(std::io::ErrorKind::TimedOut.into()))) {
        Ok((stream, peer)) => connection::serve(core, stream, peer, Some(newcomer)).await,
        Err(Unheard::Ended(error)) => tracing::info!(%from, %error, "no connection"),
        Err(Unheard::Refused(refusal, mut stream)) => {
            core.refusals.note(&*core.env.clock, (Some(from), None), &refusal);
            // A client that does not speak TLS understands this. Others have been told by the
            // handshake, or see that this is no handshake.
            let last_message = async {
                if matches!(refusal.cause, Cause::Plain | Cause::Tls) {
                    let message = ToClient::Refused { reason: refusal.reason.into_bytes() };
                    stream.write_all(&crate::frame::encode(&message)).await?;
                }
                stream.shutdown().await?;
                // If a connection is closed with unread bytes, it is reset, and the other side may
                // lose the last message.
                tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
            };
            let _elapsed = crate::rt::time::timeout(LAST_MESSAGE_TIME_MAX, last_message).await;
        }
    }
}

/// A connection without a session.
enum Unheard {
    Ended(std::io::Error),
    Refused(Refusal, TcpStream),
}

impl From<std::io::Error> for Unheard {
    fn from(error: std::io::Error) -> Self {
        Self::Ended(error)
    }
}

async fn greet(
    stream: TcpStream,
    tls: Option<ServerTls>,
) -> Result<(Box<dyn Stream>, Peer), Unheard> {
    stream.set_nodelay(true)?;
    match (tls, begins_tls(&stream).await?) {
        (None, false) => Ok((Box::new(stream), Peer::default())),
        (None, true) => Err(Unheard::Refused(
            Refusal::new(Cause::Tls, "the server does not speak TLS, and the client does"),
            stream,
        )),
        (Some(_), false) => {
            let reason = "the server speaks TLS: mount with -o tls=DIR, with what `ferry cert issue` has made at the server";
            Err(Unheard::Refused(Refusal::new(Cause::Plain, reason), stream))
        }
        (Some(tls), true) => match tls.accept(stream).await {
            Ok((stream, peer)) => Ok((stream, peer)),
            Err((error, stream)) => {
                let refusal = match tls::Fault::of(&error) {
                    None => return Err(Unheard::Ended(error)),
                    Some(tls::Fault::Certificate) => {
                        let reason = format!(
                            "the client has no certificate of this server's authority ({error})"
                        );
                        Refusal::new(Cause::Unknown, reason)
                    }
                    Some(tls::Fault::Handshake) => {
                        Refusal::new(Cause::NoGreeting, format!("no TLS of a client ({error})"))
                    }
                };
                Err(Unheard::Refused(refusal, stream))
            }
        },
    }
}

/// Whether the client begins a TLS handshake. A greeting in the clear is short: its length has a
/// zero where TLS has its version.
async fn begins_tls(stream: &TcpStream) -> std::io::Result<bool> {
    const HANDSHAKE: u8 = 0x16;
    let mut first = [0; 3];
    loop {
        match (stream.peek(&mut first).await?, first) {
            (0, _) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            (3.., [HANDSHAKE, 3, minor]) => return Ok(minor != 0),
            (1..=2, [HANDSHAKE, ..]) => {}
            _ => return Ok(false),
        }
        // The rest is on its way.
        crate::rt::time::sleep(PEEK_INTERVAL).await;
    }
}
