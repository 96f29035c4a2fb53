//! A small S3 store on loopback that does wrong what a test asks it to.

use ring::digest;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// What the store does with one request instead of answering it.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It does not arrive.
    RequestLost,
    /// It is carried out, and the answer does not arrive.
    AnswerLost,
    /// The connection ends in the middle of the answer.
    AnswerCut,
    /// A byte of the body changes before it arrives.
    BodyDamaged,
    /// An error: status, code, more elements, more headers.
    Error(u16, &'static str, String, String),
    /// These bytes (and that the connection ends).
    Raw(String),
    /// The answer comes in chunks, with pauses between them.
    Slow(Duration),
    /// No answer while the connection stands.
    Silence,
}

impl Fault {
    pub fn error(status: u16, code: &'static str) -> Self {
        Self::Error(status, code, String::new(), String::new())
    }
}

/// A request that arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub target: String,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    faults: VecDeque<Fault>,
    /// What all requests meet for a time, and those of one method, or those that create.
    standing: Option<Fault>,
    standing_of: Option<(&'static str, Fault)>,
    /// Creates replace what is there.
    replaces: bool,
    /// What the bucket says of versions and of its rules.
    rules: Option<(String, String)>,
    seen: Vec<Seen>,
    /// Answers by path, before anything else.
    pages: HashMap<String, String>,
}

pub struct Fake {
    shared: Arc<Shared>,
    address: String,
    accept: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    connections: AtomicU64,
    stop: AtomicBool,
    /// Names in one part of a list.
    list_max: usize,
    tls: Option<Arc<rustls::ServerConfig>>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The bucket that exists.
pub const BUCKET: &str = "bucket";

impl Fake {
    pub fn start() -> Self {
        Self::start_with(None)
    }

    pub fn start_with(tls: Option<Arc<rustls::ServerConfig>>) -> Self {
        // So that lists have several parts.
        Self::start_as(tls, 3)
    }

    /// For whole volumes.
    pub fn start_large() -> Self {
        Self::start_as(None, 1000)
    }

    fn start_as(tls: Option<Arc<rustls::ServerConfig>>, list_max: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("it has one").to_string();
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            connections: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            list_max,
            tls,
        });
        let serving = Arc::clone(&shared);
        let accept = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if serving.stop.load(Ordering::Relaxed) {
                    return;
                }
                let (shared, stream) = (Arc::clone(&serving), stream.expect("a connection"));
                shared.connections.fetch_add(1, Ordering::Relaxed);
                // A connection ends when its client closes it.
                std::thread::spawn(move || shared.serve(stream));
            }
        });
        Self { shared, address, accept: Some(accept) }
    }

    /// The endpoint.
    pub fn url(&self) -> String {
        let scheme = if self.shared.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// The next requests meet these.
    pub fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.shared.state().faults.extend(faults);
    }

    /// All requests meet this until it is `None`.
    pub fn fail_all(&self, fault: Option<Fault>) {
        self.shared.state().standing = fault;
    }

    /// All requests of a method meet this until it is `None`.
    pub fn fail_method(&self, fault: Option<(&'static str, Fault)>) {
        self.shared.state().standing_of = fault;
    }

    /// Creates replace what is there, as in a store that does not know conditions.
    pub fn replace(&self) {
        self.shared.state().replaces = true;
    }

    /// What the bucket says of versions and of its lifecycle rules.
    pub fn rules(&self, versioning: &str, lifecycle: &str) {
        self.shared.state().rules = Some((versioning.into(), lifecycle.into()));
    }

    /// Puts an object into the bucket.
    pub fn put(&self, key: &str, bytes: &[u8]) {
        self.shared.state().objects.insert(key.into(), bytes.into());
    }

    /// The names of all objects.
    pub fn keys(&self) -> Vec<String> {
        self.shared.state().objects.keys().cloned().collect()
    }

    /// The answer to GET and PUT of a path.
    pub fn page(&self, path: &str, body: &str) {
        self.shared.state().pages.insert(path.into(), body.into());
    }

    pub fn object(&self, key: &str) -> Option<Vec<u8>> {
        self.shared.state().objects.get(key).cloned()
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.shared.state().seen.clone()
    }

    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(&self.address));
        if let Some(accept) = self.accept.take() {
            accept.join().expect("it does not panic");
        }
    }
}

struct Reply {
    status: u16,
    headers: String,
    body: Vec<u8>,
}

fn reply(status: u16, body: impl Into<Vec<u8>>) -> Reply {
    Reply { status, headers: String::new(), body: body.into() }
}

fn error(status: u16, code: &str, more: &str) -> Reply {
    let body = format!("<?xml version=\"1.0\"?>\n<Error><Code>{code}</Code>{more}</Error>");
    reply(status, body)
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

impl Shared {
    fn serve(&self, stream: TcpStream) {
        match &self.tls {
            None => self.talk(stream),
            Some(config) => {
                let tls = rustls::ServerConnection::new(Arc::clone(config)).expect("it is valid");
                self.talk(rustls::StreamOwned::new(tls, stream));
            }
        }
    }

    fn talk(&self, stream: impl Stream) {
        let mut stream = BufReader::new(stream);
        while let Some(request) = self.receive(&mut stream) {
            let Some(mut request) = request else { continue };
            let fault = {
                let mut state = self.state();
                state.seen.push(request.clone());
                let fault = state.faults.pop_front().or_else(|| state.standing.clone());
                fault.or_else(|| {
                    let (method, fault) = state.standing_of.clone()?;
                    (method == request.method).then_some(fault)
                })
            };
            let bytes = match fault {
                Some(Fault::RequestLost) => return,
                Some(Fault::Raw(text)) => {
                    // Else the client may send its next request into the end of the connection.
                    let text = text.replacen("\r\n", "\r\nConnection: close\r\n", 1);
                    stream.get_mut().write_all(text.as_bytes()).ok();
                    return;
                }
                Some(Fault::Silence) => {
                    // Until the client goes.
                    stream.read_to_end(&mut vec![]).ok();
                    return;
                }
                Some(Fault::AnswerLost) => {
                    self.answer(&request);
                    return;
                }
                Some(Fault::AnswerCut) => {
                    let bytes = encode(&self.answer(&request));
                    stream.get_mut().write_all(&bytes[..bytes.len() - 1]).ok();
                    return;
                }
                Some(Fault::BodyDamaged) => {
                    request.body[0] ^= 1;
                    encode(&self.answer(&request))
                }
                Some(Fault::Slow(pause)) => {
                    let (_never, waits) = mpsc::channel::<()>();
                    for chunk in encode(&self.answer(&request)).chunks(8) {
                        stream.get_mut().write_all(chunk).ok();
                        waits.recv_timeout(pause).ok();
                    }
                    continue;
                }
                Some(Fault::Error(status, code, more, headers)) => {
                    encode(&Reply { headers, ..error(status, code, &more) })
                }
                None => encode(&self.answer(&request)),
            };
            if stream.get_mut().write_all(&bytes).is_err() {
                return;
            }
        }
    }

    /// The next request; `Some(None)` if it was refused before its body was sent, `None` at the end
    /// of the connection.
    fn receive(&self, stream: &mut BufReader<impl Stream>) -> Option<Option<Seen>> {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let mut words = line.split(' ').map(str::to_owned);
        let (method, target) = (words.next()?, words.next()?);
        let mut headers = HashMap::new();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim().split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let length = headers.get("content-length").map_or(Some(0), |text| text.parse().ok())?;
        let mut request = Seen { method, target, headers, body: vec![0; length] };
        if request.headers.contains_key("expect") {
            // An error is said before the body comes; the connection then ends.
            let refusal = self.state().faults.pop_front();
            if let Some(Fault::Error(status, code, ..)) = refusal {
                self.state().seen.push(request);
                let bytes = encode(&error(status, code, ""));
                stream.get_mut().write_all(&bytes).ok()?;
                return None;
            }
            stream.get_mut().write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
        }
        stream.read_exact(&mut request.body).ok()?;
        Some(Some(request))
    }

    fn answer(&self, request: &Seen) -> Reply {
        let mut state = self.state();
        let header = |name: &str| request.headers.get(name).map(String::as_str);
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        if let Some(page) = state.pages.get(path) {
            return reply(200, page.as_bytes());
        }
        let checksum = digest::digest(&digest::SHA256, &request.body);
        let hex: String = checksum.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        if header("x-amz-content-sha256") != Some(hex.as_str()) {
            return error(400, "XAmzContentSHA256Mismatch", "");
        }
        if !header("authorization").is_some_and(|text| text.contains("host;")) {
            return error(403, "AccessDenied", "");
        }
        let Some(key) = path.strip_prefix(&format!("/{BUCKET}")) else {
            return error(404, "NoSuchBucket", "");
        };
        let key = key.strip_prefix('/').unwrap_or("");
        match (request.method.as_str(), key) {
            ("GET", "") if query.contains("list-type=2") => self.list(&state, query),
            ("GET", "") => match &state.rules {
                Some((versioning, _)) if query.contains("versioning") => {
                    reply(200, versioning.as_bytes())
                }
                Some((_, lifecycle)) => reply(200, lifecycle.as_bytes()),
                None => error(501, "NotImplemented", ""),
            },
            ("GET", key) => {
                let Some(bytes) = state.objects.get(key) else {
                    return error(404, "NoSuchKey", "");
                };
                let Some(range) = header("range").and_then(|range| range.strip_prefix("bytes="))
                else {
                    return reply(200, bytes.clone());
                };
                let (start, last) = range.split_once('-').expect("a range");
                let (start, last): (usize, usize) =
                    (start.parse().expect("a number"), last.parse().expect("a number"));
                if start >= bytes.len() {
                    return error(416, "InvalidRange", "");
                }
                let last = last.min(bytes.len() - 1);
                Reply {
                    status: 206,
                    headers: format!("Content-Range: bytes {start}-{last}/{}\r\n", bytes.len()),
                    body: bytes[start..=last].to_vec(),
                }
            }
            ("PUT", key) => {
                let exclusive = header("if-none-match") == Some("*") && !state.replaces;
                if exclusive && state.objects.contains_key(key) {
                    return error(412, "PreconditionFailed", "");
                }
                state.objects.insert(key.into(), request.body.clone());
                reply(200, "")
            }
            ("DELETE", key) => {
                state.objects.remove(key);
                reply(204, "")
            }
            _ => error(405, "MethodNotAllowed", ""),
        }
    }

    /// A list in parts of a few names each.
    fn list(&self, state: &State, query: &str) -> Reply {
        let value = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            let value = pairs.find(|(key, _)| *key == name)?.1;
            Some(value.replace("%2F", "/"))
        };
        let (prefix, after) = (value("prefix").unwrap_or_default(), value("continuation-token"));
        let after = after.unwrap_or_default();
        let mut keys = state.objects.keys().filter(|key| key.starts_with(&prefix));
        let keys: Vec<_> =
            keys.by_ref().filter(|key| **key > after).take(self.list_max + 1).collect();
        let more = keys.len() > self.list_max;
        let mut body = format!(
            "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
             <EncodingType>url</EncodingType><IsTruncated>{more}</IsTruncated>"
        );
        for key in keys.iter().take(self.list_max) {
            body += &format!("<Contents><Key>{}</Key></Contents>", key.replace('/', "%2F"));
        }
        if more {
            body += &format!(
                "<NextContinuationToken>{}</NextContinuationToken>",
                keys[self.list_max - 1]
            );
        }
        reply(200, body + "</ListBucketResult>")
    }
}

fn encode(reply: &Reply) -> Vec<u8> {
    // A deletion has no body, and says no length.
    let length = match reply.status {
        204 => String::new(),
        _ => format!("Content-Length: {}\r\n", reply.body.len()),
    };
    let head = format!("HTTP/1.1 {} x\r\n{length}{}\r\n", reply.status, reply.headers);
    [head.as_bytes(), &reply.body].concat()
}
