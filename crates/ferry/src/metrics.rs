//! `-o metrics=ADDR`: serves what `ferry stats` shows to Prometheus, over HTTP. The figures are
//! read when a scraper asks, from the same source, so nothing is counted for it.

mod table;

use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
use serde_json::Value;

use crate::error::CliError;
use crate::http::{Request, Response};
use crate::listen::{Bound, Endpoint};

/// The path of the page.
const PATH: &str = "/metrics";

/// Serves `figures` in a thread, until the returned value is dropped. `figures` returns `None` when
/// what it counts has ended.
pub fn serve(
    bound: Bound,
    figures: impl Fn() -> Option<Value> + Send + 'static,
) -> Result<Endpoint, CliError> {
    let address = bound.address().to_owned();
    let endpoint = bound.serve("ferry-metrics", move |request| answer(request, &figures))?;
    tracing::info!(metrics = address, "serving figures");
    Ok(endpoint)
}

fn answer(request: &Request<'_>, figures: impl Fn() -> Option<Value>) -> Response {
    if request.path != PATH {
        return Response::refusal("404 Not Found", "the figures are at /metrics");
    }
    match figures().map(table::page) {
        Some(body) => Response { status: "200 OK", content_type: CONTENT_TYPE, headers: "", body },
        None => Response::refusal("503 Service Unavailable", "it is being closed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_figures_are_served() {
        let status = |target: &str, figures: Option<Value>| {
            answer(&Request::of(target, &[]), || figures.clone()).status
        };
        let figures = Some(Value::Null);
        assert_eq!(status("/metrics", figures.clone()), "200 OK");
        assert_eq!(status("/metrics?name=a", figures.clone()), "200 OK");
        assert_eq!(status("/", figures.clone()), "404 Not Found");
        assert_eq!(status("/metrics/../etc", figures), "404 Not Found");
        assert_eq!(status("/metrics", None), "503 Service Unavailable");
    }
}
