//! What administrators see of a session.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use super::state::{Link, Session};

impl Session {
    /// Logs that a client has connected.
    pub(in crate::server) fn log_arrival(&self, how: &str) {
        let (number, client, certificate) = (self.number, &self.name, self.peer.name.as_deref());
        let address = self.state.lock().from.map(|from| from.to_string());
        let path = String::from_utf8_lossy(&self.path);
        tracing::info!(number, client, certificate, address, %path, "{how}");
    }

    /// Logs that a connection is closed.
    pub(in crate::server) fn log_departure(&self, from: Option<SocketAddr>, error: Option<&str>) {
        let (number, client, certificate) = (self.number, &self.name, self.peer.name.as_deref());
        tracing::info!(
            number,
            client,
            certificate,
            address = from.map(|from| from.to_string()),
            error,
            "disconnected"
        );
    }

    /// The figures for `ferry clients`.
    pub(in crate::server) fn json(&self, now: Duration) -> Value {
        let [(granted_bytes, granted_inodes), (reserved_bytes, reserved_inodes)] =
            self.reservations.figures();
        let state = self.state.lock();
        let under_way = state.worker.under_way();
        let bytes = state.queued + under_way.map_or(0, |change| change.bytes);
        let oldest = under_way
            .map(|change| change.arrived)
            .or(state.queue.front().map(|change| change.arrived));
        let oldest = oldest.map(|arrived| now.saturating_sub(arrived));
        Value::from_iter([
            ("client", Value::from(self.number)),
            ("name", self.name.as_str().into()),
            ("certificate", self.peer.name.as_deref().into()),
            ("address", state.from.map(|from| from.to_string()).into()),
            ("path", String::from_utf8_lossy(&self.path).into()),
            ("read_only", self.read_only.into()),
            ("protocol", state.protocol.version().into()),
            ("connected", matches!(state.link, Link::Connected(_)).into()),
            ("connections", state.connection.into()),
            ("changes", state.applied.into()),
            ("unanswered", (state.received - state.applied).into()),
            ("unanswered_bytes", bytes.into()),
            ("oldest_ms", oldest.map(|age| age.as_millis() as u64).into()),
            ("answers_kept", state.answers.len().into()),
            (
                "early_not_durable",
                if state.newest_unstable > state.durable {
                    state.applied - state.durable
                } else {
                    0
                }
                .into(),
            ),
            (
                "early_not_durable_ms",
                state.unsynced_since.map(|at| now.saturating_sub(at).as_millis() as u64).into(),
            ),
            ("granted_bytes", granted_bytes.into()),
            ("granted_inodes", granted_inodes.into()),
            ("reserved_bytes", reserved_bytes.into()),
            ("reserved_inodes", reserved_inodes.into()),
            ("inodes", state.known.len().into()),
            ("open_files", state.handles.len().into()),
        ])
    }
}
