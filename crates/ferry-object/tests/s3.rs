//! `S3Store` against a store that fails in every way that a test asks for.

#[expect(dead_code, reason = "tests of the command use the rest")]
mod fake;

use fake::{BUCKET, Fake, Fault};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::{Clock, Env};
use ferry_object::{
    Claimant, Limits, ObjectDevice, ObjectError, S3Settings, S3Store, Store, ThreadExecutor,
    TimeLimits, VolumeOptions, prove,
};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const SECRET: &str = "secret-of-the-test";
const TOKEN: &str = "token-of-the-test";

fn settings(endpoint: &str, more: &[(&str, &str)]) -> Result<S3Settings, ObjectError> {
    S3Settings::from_variables(Some(endpoint), &|name| {
        let given = more.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        let value = given.or(match name {
            "AWS_ACCESS_KEY_ID" => Some("KEYID"),
            "AWS_SECRET_ACCESS_KEY" => Some(SECRET),
            "AWS_SESSION_TOKEN" => Some(TOKEN),
            "HOME" => Some("/nonexistent"),
            _ => None,
        });
        value.filter(|value| !value.is_empty()).map(str::to_owned)
    })
}

fn open(settings: &S3Settings) -> S3Store {
    let location = format!("s3://{BUCKET}/vol").parse().expect("it is a location");
    S3Store::open(&location, settings, &Env::real()).expect("the settings are complete")
}

fn store(fake: &Fake) -> S3Store {
    open(&settings(&fake.url(), &[]).expect("they are complete"))
}

/// A process that is stopped between two writes leaves half of an object, and some stores lock its
/// name then.
#[test]
fn a_small_object_is_sent_with_one_write() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("it has an address"));
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the store is called");
        [1000, 30_000].map(|_| {
            let mut bytes = vec![0; 1 << 20];
            let len = stream.read(&mut bytes).expect("a request comes");
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").expect("it hears");
            bytes.truncate(len);
            bytes
        })
    });
    let store = open(&settings(&url, &[]).expect("they are complete"));
    for (len, byte) in [(1000, 1), (30_000, 2)] {
        store.put("s/1", &vec![byte; len]).expect("put");
    }
    let requests = served.join().expect("it has answered");
    for (request, (len, byte)) in requests.iter().zip([(1000, 1), (30_000, 2)]) {
        assert!(request.starts_with(b"PUT "));
        assert!(request.ends_with(&[b"\r\n\r\n".to_vec(), vec![byte; len]].concat()));
    }
}

#[test]
fn objects_are_read_as_they_were_written() {
    let fake = Fake::start();
    let store = store(&fake);
    store.put("s/1", b"12345").expect("put");
    store.create("e/1", b"").expect("create");
    assert_eq!(store.create("e/1", b"x"), Err(ObjectError::Exists("e/1".into())));
    assert_eq!(fake.object("vol/s/1").as_deref(), Some(&b"12345"[..]));
    assert_eq!(store.get("s/1", None), Ok(b"12345".to_vec()));
    assert_eq!(store.get("s/1", Some(1..3)), Ok(b"23".to_vec()));
    assert_eq!(store.get("s/1", Some(4..9)), Ok(b"5".to_vec()));
    assert_eq!(store.get("s/1", Some(5..9)), Ok(vec![]));
    assert_eq!(store.get("s/1", Some(2..2)), Ok(vec![]));
    assert_eq!(store.get("s/2", Some(0..1)), Err(ObjectError::NotFound("s/2".into())));
    store.delete("s/1").expect("delete");
    store.delete("s/1").expect("delete again");
    assert_eq!(store.get("s/1", None), Err(ObjectError::NotFound("s/1".into())));
}

#[test]
fn the_header_that_makes_a_create_exclusive_is_signed() {
    let fake = Fake::start();
    store(&fake).create("e/1", b"x").expect("create");
    let seen = fake.seen().pop().expect("it arrived");
    assert_eq!(seen.headers["if-none-match"], "*");
    let signed = &seen.headers["authorization"];
    assert!(signed.contains("SignedHeaders=host;if-none-match;x-amz-content-sha256"), "{signed}");
}

#[test]
fn a_list_is_whole_and_ascending() {
    let fake = Fake::start();
    let store = store(&fake);
    for n in [7, 3, 1, 9, 5, 0, 2] {
        store.put(&format!("w/{n}"), b"").expect("put");
    }
    store.put("x/1", b"").expect("put");
    let names = [0, 1, 2, 3, 5, 7, 9].map(|n| format!("w/{n}"));
    assert_eq!(store.list("w/"), Ok(names.to_vec()));
    assert_eq!(store.list("none/"), Ok(vec![]));
    let part = |text: &str| {
        let answer = format!("HTTP/1.1 200 x\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        fake.fail([Fault::Raw(answer)]);
        store.list("w/")
    };
    for bad in [
        "",
        "<html></html>",
        "<ListBucketResult></ListBucketResult>",
        "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    ] {
        assert!(matches!(part(bad), Err(ObjectError::Unavailable(_))), "{bad}");
    }
}

#[test]
fn after_a_create_that_is_not_answered_the_object_tells() {
    let fake = Fake::start();
    let store = store(&fake);
    fake.fail([Fault::RequestLost]);
    assert!(matches!(store.create("w/1", b"a"), Err(ObjectError::Unavailable(_))));
    assert_eq!(fake.object("vol/w/1"), None);
    for lost in [Fault::AnswerLost, Fault::AnswerCut] {
        fake.fail([lost]);
        store.create("w/1", b"a").expect("it is there");
        fake.fail([Fault::RequestLost]);
        assert_eq!(store.create("w/1", b"b"), Err(ObjectError::Exists("w/1".into())));
        // Nothing is known if the second question is not answered either.
        fake.fail([Fault::RequestLost, Fault::RequestLost]);
        assert!(matches!(store.create("w/1", b"b"), Err(ObjectError::Unavailable(_))));
        store.delete("w/1").expect("delete");
    }
    // Some stores say it this way.
    fake.fail([Fault::Raw("HTTP/1.1 304 x\r\n\r\n".into())]);
    assert_eq!(store.create("w/1", b"a"), Err(ObjectError::Exists("w/1".into())));
    // AWS, if another create of this name is under way: it may still fail.
    fake.fail([Fault::error(409, "ConditionalRequestConflict")]);
    assert!(matches!(store.create("w/1", b"a"), Err(ObjectError::Unavailable(_))));
    store.create("w/1", b"a").expect("it was not created");
}

#[test]
fn bytes_that_are_damaged_on_the_way_are_not_stored() {
    let fake = Fake::start();
    let store = store(&fake);
    fake.fail([Fault::BodyDamaged]);
    assert!(matches!(store.put("s/1", b"abc"), Err(ObjectError::Unavailable(_))));
    assert_eq!(fake.object("vol/s/1"), None);
    store.put("s/1", b"abc").expect("the next try arrives");
}

#[test]
fn half_an_answer_is_no_answer() {
    let fake = Fake::start();
    let store = store(&fake);
    store.put("s/1", &[7; 1000]).expect("put");
    let raw = |text: &str| Fault::Raw(text.replace('|', "\r\n"));
    for fault in [
        Fault::AnswerCut,
        Fault::AnswerLost,
        Fault::RequestLost,
        raw("HTTP/1.1 206 x|Content-Length: 9|Content-Range: bytes 0-8/1000||123456789"),
        raw("HTTP/1.1 206 x|Content-Length: 10|Content-Range: bytes 1-10/1000||1234567890"),
        raw("HTTP/1.1 206 x|Content-Length: 10||1234567890"),
        raw("HTTP/1.1 206 x|Transfer-Encoding: chunked||5|12345|"),
        raw("HTTP/1.1 206 x|Content-Length: 99999999999999999999||1"),
        raw("garbage"),
        raw("HTTP/1.1 200 x|Content-Length: 10||123"),
    ] {
        fake.fail([fault.clone()]);
        let result = store.get("s/1", Some(0..10));
        assert!(matches!(result, Err(ObjectError::Unavailable(_))), "{fault:?}: {result:?}");
    }
    assert_eq!(store.get("s/1", Some(0..10)), Ok(vec![7; 10]));
    // A proxy that knows no ranges.
    fake.fail([raw("HTTP/1.1 200 x|Content-Length: 12||123456789012")]);
    assert_eq!(store.get("s/1", Some(3..5)), Ok(b"45".to_vec()));
}

/// An owner that follows a log takes "not found" for its end.
#[test]
fn only_the_stores_own_word_says_that_an_object_is_not_there() {
    let fake = Fake::start();
    let store = store(&fake);
    store.put("w/1", b"x").expect("put");
    let page = "HTTP/1.1 404 x\r\nContent-Length: 13\r\n\r\n<html></html>";
    for fault in [Fault::Raw(page.into()), Fault::error(404, "NoSuchUpload")] {
        fake.fail([fault]);
        assert!(matches!(store.get("w/1", None), Err(ObjectError::Unavailable(_))));
    }
}

#[test]
fn an_error_says_what_to_do_and_no_secret() {
    let fake = Fake::start();
    let store = store(&fake);
    let echo = format!("<Message>{}</Message>", "signed by KEYID");
    for (status, code, words) in [
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "AccessDenied", "s3:PutObject in bucket bucket"),
        (403, "RequestTimeTooSkewed", "set it, for example with chrony"),
        (400, "ExpiredToken", "log in again"),
        (404, "NoSuchBucket", "there is no bucket bucket"),
        (501, "NotImplemented", "cannot do what a volume needs"),
        (507, "XMinioStorageFull", "no space left"),
        (400, "SomethingNew", "SomethingNew"),
    ] {
        fake.fail([Fault::Error(status, code, echo.clone(), String::new())]);
        let Err(error) = store.create("w/1", b"x") else { panic!("{code} is an error") };
        assert!(matches!(error, ObjectError::Refused(_)), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(words), "{text}");
        assert!(!text.contains(SECRET) && !text.contains(TOKEN), "{text}");
    }
    for (status, code) in [
        (503, "SlowDown"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
        (502, ""),
        (429, "TooManyRequests"),
        (408, ""),
        (400, "RequestTimeout"),
        (409, "OperationAborted"),
    ] {
        fake.fail([Fault::error(status, code)]);
        let result = store.create("w/1", b"x");
        assert!(matches!(result, Err(ObjectError::Unavailable(_))), "{code}: {result:?}");
    }
    store.create("w/1", b"x").expect("after all of these it is not there");
}

#[test]
fn a_wrong_region_is_named() {
    let fake = Fake::start();
    let store = store(&fake);
    let header = "x-amz-bucket-region: eu-west-1\r\n";
    let element = "<Region>eu-west-1</Region>";
    for fault in [
        Fault::Error(301, "PermanentRedirect", String::new(), header.into()),
        Fault::Error(400, "AuthorizationHeaderMalformed", element.into(), String::new()),
    ] {
        fake.fail([fault]);
        let error = store.get("super", None).expect_err("it is elsewhere");
        assert!(error.to_string().contains("set AWS_REGION=eu-west-1"), "{error}");
    }
}

#[test]
fn a_wrong_clock_is_said_with_its_error() {
    let fake = Fake::start();
    let location = format!("s3://{BUCKET}").parse().expect("it is a location");
    let env = Env { clock: TestClock::at(1_369_353_600), ..Env::real() };
    let settings = settings(&fake.url(), &[]).expect("they are complete");
    let store = S3Store::open(&location, &settings, &env).expect("the settings are complete");
    for (date, text) in [
        ("Fri, 24 May 2013 01:00:00 GMT", "3600 s behind"),
        ("Thu, 23 May 2013 23:00:00 GMT", "3600 s ahead"),
    ] {
        let header = format!("Date: {date}\r\n");
        fake.fail([Fault::Error(403, "RequestTimeTooSkewed", String::new(), header)]);
        let error = store.get("super", None).expect_err("it is refused");
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_store_that_says_nothing_is_left_and_one_that_is_slow_is_not() {
    let fake = Fake::start();
    let mut settings = settings(&fake.url(), &[]).expect("they are complete");
    settings.limits = TimeLimits { idle: Duration::from_millis(100), ..TimeLimits::default() };
    let impatient = open(&settings);
    impatient.put("s/1", &[7; 300]).expect("put");
    fake.fail([Fault::Silence]);
    let error = impatient.get("s/1", None).expect_err("nothing comes");
    assert_eq!(
        error,
        ObjectError::Unavailable(format!(
            "{}: no byte came or went for 0.1 s",
            fake.url().trim_start_matches("http://")
        ))
    );
    // Longer than the limit in all, and never in one pause.
    settings.limits.idle = Duration::from_millis(1500);
    fake.fail([Fault::Slow(Duration::from_millis(50))]);
    assert_eq!(open(&settings).get("s/1", None), Ok(vec![7; 300]));
    settings.limits.request = Duration::from_millis(300);
    fake.fail([Fault::Slow(Duration::from_millis(50))]);
    let error = open(&settings).get("s/1", None).expect_err("it takes longer");
    assert!(error.to_string().contains("no whole answer within 0.3 s"), "{error}");
}

#[test]
fn nobody_there_is_unavailable() {
    let fake = Fake::start();
    let settings = settings(&fake.url(), &[]).expect("they are complete");
    drop(fake);
    let error = open(&settings).get("super", None).expect_err("nobody listens");
    assert!(matches!(error, ObjectError::Unavailable(_)), "{error:?}");
}

#[test]
fn connections_are_kept() {
    let fake = Fake::start();
    let store = store(&fake);
    for n in 0..40 {
        store.create(&format!("w/{n}"), &[1; 5000]).expect("create");
        store.get(&format!("w/{n}"), Some(0..10)).expect("get");
        store.delete(&format!("w/{n}")).expect("delete");
        store.get(&format!("w/{n}"), None).expect_err("it is deleted");
    }
    assert_eq!(fake.connections(), 1);
}

#[test]
fn a_large_object_is_not_sent_to_a_store_that_refuses_it() {
    let fake = Fake::start();
    let store = store(&fake);
    let bytes = vec![7; 5 << 20];
    fake.fail([Fault::error(403, "AccessDenied")]);
    let error = store.put("s/1", &bytes).expect_err("it is refused");
    assert!(error.to_string().contains("s3:PutObject"), "{error}");
    store.put("s/1", &bytes).expect("put");
    assert_eq!(store.get("s/1", None), Ok(bytes));
}

#[test]
fn the_proof_passes_and_says_what_the_store_does_not_tell() {
    let fake = Fake::start();
    let env = Env::real();
    let threads = ThreadExecutor::new(&env).expect("threads can be started");
    let warnings = prove(&store(&fake), &threads, &env).expect("it keeps the rules");
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("s3:GetBucketVersioning"), "{warnings:?}");
    assert_eq!(store(&fake).list(""), Ok(vec![]));
}

#[test]
fn a_volume_outlives_answers_that_are_lost() {
    let fake = Arc::new(Fake::start());
    let env = Env::real();
    let store: Arc<dyn Store> = Arc::new(store(&fake));
    let threads = || Arc::new(ThreadExecutor::new(&env).expect("threads can be started"));
    let options = VolumeOptions { window: 4, ..VolumeOptions::new(16 << 20, (0, 1 << 20)) };
    ObjectDevice::make(Arc::clone(&store), threads(), &options, &env).expect("a new volume");
    let open = |take_over| {
        let claimant = Claimant { take_over, ..Claimant::default() };
        let limits = Limits { term: Duration::from_millis(20), ..Limits::default() };
        ObjectDevice::open(Arc::clone(&store), threads(), &claimant, limits, &env)
    };
    let device = open(false).expect("it is free");
    for round in 0..12_u8 {
        fake.fail(match round % 4 {
            0 => [Fault::AnswerLost, Fault::error(503, "SlowDown")],
            1 => [Fault::error(409, "ConditionalRequestConflict"), Fault::AnswerLost],
            2 => [Fault::BodyDamaged, Fault::AnswerCut],
            _ => [Fault::RequestLost, Fault::Raw("garbage".into())],
        });
        let mut buf = AlignedBuf::zeroed(3 * BLOCK_SIZE);
        buf.fill(round + 1);
        device.write(u64::from(round) * 3 * BLOCK_SIZE as u64, &buf).expect("write");
        device.flush().expect("it is repeated until it is answered");
    }
    let next = open(true).expect("it can be taken over");
    let mut buf = AlignedBuf::zeroed(36 * BLOCK_SIZE);
    next.read(0, &mut buf).expect("it can be read");
    for (round, blocks) in buf.chunks(3 * BLOCK_SIZE).enumerate() {
        assert!(blocks.iter().all(|byte| *byte == round as u8 + 1), "round {round}");
    }
}

/// A new volume in the store, and the limits with which it is opened.
fn new_volume(store: &Arc<dyn Store>, env: &Env) {
    let threads = Arc::new(ThreadExecutor::new(env).expect("threads can be started"));
    let options = VolumeOptions { window: 4, ..VolumeOptions::new(16 << 20, (0, 1 << 20)) };
    ObjectDevice::make(Arc::clone(store), threads, &options, env).expect("a new volume");
}

fn open_device(
    store: &Arc<dyn Store>,
    limits: Limits,
    env: &Env,
) -> Result<Arc<ObjectDevice>, ObjectError> {
    let threads = Arc::new(ThreadExecutor::new(env).expect("threads can be started"));
    ObjectDevice::open(Arc::clone(store), threads, &Claimant::default(), limits, env)
}

#[test]
fn what_the_store_refuses_for_a_time_is_held_and_goes_on() {
    let fake = Fake::start();
    let env = Env::real();
    let store: Arc<dyn Store> = Arc::new(store(&fake));
    new_volume(&store, &env);
    let device = open_device(&store, Limits::default(), &env).expect("it is free");
    let filled = |byte: u8| {
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        buf.fill(byte);
        buf
    };
    // Each round reads from another object: what was read a moment ago is in memory.
    let offset = |round: usize| (round as u64 + 2) * BLOCK_SIZE as u64;
    for round in 0..4 {
        device.write(offset(round), &filled(round as u8 + 1)).expect("write");
        device.flush().expect("flush");
    }
    for (round, fault) in [
        Fault::error(403, "AccessDenied"),
        Fault::error(404, "NoSuchBucket"),
        Fault::error(507, "QuotaExceeded"),
        Fault::RequestLost,
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(device.held_requests(), None);
        fake.fail_all(Some(fault));
        device.write(BLOCK_SIZE as u64, &filled(round as u8)).expect("it is in memory");
        std::thread::scope(|scope| {
            let flush = scope.spawn(|| device.flush());
            let read = scope.spawn(|| {
                let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
                device.read(offset(round), &mut buf).map(|()| buf[0])
            });
            while device.held_requests().is_none_or(|held| held.requests < 2) {
                if read.is_finished() {
                    fake.fail_all(None);
                    panic!("the read asks the store");
                }
                std::thread::yield_now();
            }
            let held = device.held_requests().expect("two requests are held");
            let word = ["s3:", "make it", "no space left", "127.0.0.1"][round];
            assert!(held.reason.contains(word), "{held:?}");
            assert!(!flush.is_finished() && !read.is_finished(), "both wait");
            fake.fail_all(None);
            flush.join().expect("no panic").expect("it goes on");
            assert_eq!(read.join().expect("no panic").expect("it goes on"), round as u8 + 1);
        });
    }
    assert_eq!(device.held_requests(), None);
    assert_eq!(device.failure(), None);
}

#[test]
fn a_volume_is_not_opened_while_the_store_refuses_or_is_away() {
    let fake = Fake::start();
    let env = Env::real();
    let store: Arc<dyn Store> = Arc::new(store(&fake));
    new_volume(&store, &env);
    let before = fake.keys();
    fake.fail_all(Some(Fault::error(403, "AccessDenied")));
    let refused = open_device(&store, Limits::default(), &env).err();
    assert!(matches!(refused, Some(ObjectError::Refused(_))), "{refused:?}");
    fake.fail_all(Some(Fault::error(503, "SlowDown")));
    let limits = Limits { patience: Duration::from_millis(400), ..Limits::default() };
    let away = open_device(&store, limits, &env).err();
    assert!(matches!(away, Some(ObjectError::Unavailable(_))), "{away:?}");
    fake.fail_all(None);
    assert_eq!(fake.keys(), before, "nothing was claimed");
    fake.fail([Fault::error(503, "SlowDown"), Fault::error(503, "SlowDown")]);
    open_device(&store, Limits::default(), &env).expect("it was patient");
}

#[test]
fn keys_of_a_file_are_read_again_when_they_have_expired() {
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join("credentials");
    let write = |id: &str| {
        let text = format!("[default]\naws_access_key_id={id}\naws_secret_access_key=s\n");
        std::fs::write(&file, text).expect("it can be written");
    };
    write("FIRST");
    let fake = Fake::start();
    let path = file.to_str().expect("it is text");
    let none = ("AWS_ACCESS_KEY_ID", "");
    let more = [none, ("AWS_SECRET_ACCESS_KEY", ""), ("AWS_SHARED_CREDENTIALS_FILE", path)];
    let store = open(&settings(&fake.url(), &more).expect("they are complete"));
    store.put("s/1", b"x").expect("put");
    fake.fail([Fault::error(400, "ExpiredToken")]);
    let error = store.put("s/1", b"x").expect_err("there are no others");
    assert!(error.to_string().contains("the session of key FIRST has ended"), "{error}");
    write("SECOND");
    fake.fail([Fault::error(400, "ExpiredToken")]);
    store.put("s/1", b"x").expect("the new ones are used");
    let last = fake.seen().pop().expect("it arrived");
    assert!(last.headers["authorization"].contains("Credential=SECOND/"));
}

#[test]
fn a_command_of_the_profile_prints_keys() {
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join("config");
    let json = r#"{"Version":1,"AccessKeyId":"MADE","SecretAccessKey":"s","SessionToken":"t"}"#;
    std::fs::write(&file, format!("[default]\ncredential_process = echo '{json}'\n"))
        .expect("it can be written");
    let fake = Fake::start();
    let path = file.to_str().expect("it is text");
    let more =
        [("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", ""), ("AWS_CONFIG_FILE", path)];
    let store = open(&settings(&fake.url(), &more).expect("they are complete"));
    store.put("s/1", b"x").expect("put");
    let seen = fake.seen().pop().expect("it arrived");
    assert!(seen.headers["authorization"].contains("Credential=MADE/"));
    std::fs::write(&file, "[default]\ncredential_process = echo a-secret; exit 3\n")
        .expect("it can be written");
    let settings = settings(&fake.url(), &more).expect("they are complete");
    let error = open(&settings).put("s/1", b"x").expect_err("the command fails");
    assert!(error.to_string().contains("exit status: 3"), "{error}");
    assert!(!format!("{error:?} {settings:?}").contains("a-secret"), "{error:?} {settings:?}");
    assert_eq!(seen.headers["x-amz-security-token"], "t");
}

/// A clock that a test sets.
struct TestClock(AtomicU64);

impl TestClock {
    fn at(secs: u64) -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(secs)))
    }
}

impl Clock for TestClock {
    fn monotonic(&self) -> Duration {
        self.wall()
    }
    fn wall(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
}

#[test]
fn the_role_of_the_machine_has_keys_that_are_renewed_in_time() {
    let (fake, metadata) = (Fake::start(), Fake::start());
    let role = "/latest/meta-data/iam/security-credentials/";
    let keys = |id: &str, end: &str| {
        let json = format!(
            r#"{{"Code":"Success","AccessKeyId":"{id}","SecretAccessKey":"s","Token":"t","Expiration":"{end}"}}"#
        );
        metadata.page(&format!("{role}the-role"), &json);
    };
    metadata.page("/latest/api/token", "session");
    metadata.page(role, "the-role\n");
    metadata.page("/latest/meta-data/placement/region", "eu-west-3");
    keys("FIRST", "2013-05-24T06:00:00Z");
    let url = metadata.url();
    let more = [
        ("AWS_ACCESS_KEY_ID", ""),
        ("AWS_SECRET_ACCESS_KEY", ""),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", url.as_str()),
    ];
    let clock = TestClock::at(1_369_353_600);
    let env = Env { clock: Arc::clone(&clock) as Arc<dyn Clock>, ..Env::real() };
    let location = format!("s3://{BUCKET}/vol").parse().expect("it is a location");
    let settings = settings(&fake.url(), &more).expect("they are complete");
    let store = S3Store::open(&location, &settings, &env).expect("the settings are complete");
    let used = || {
        store.put("s/1", b"x").expect("put");
        let seen = fake.seen().pop().expect("it arrived");
        let text = seen.headers["authorization"].clone();
        assert!(text.contains("/eu-west-3/s3/"), "{text}");
        text.split_once("Credential=").expect("it has one").1.split('/').next().map(str::to_owned)
    };
    let first = Some("FIRST".to_owned());
    assert_eq!(used(), first);
    assert_eq!(metadata.seen()[0].method, "PUT");
    assert_eq!(metadata.seen()[1].headers["x-aws-ec2-metadata-token"], "session");
    keys("SECOND", "2013-05-24T12:00:00Z");
    assert_eq!(used(), first);
    // Four minutes before they expire: a service that does not answer is no harm yet.
    clock.0.store(1_369_353_600 + 6 * 3600 - 240, Ordering::Relaxed);
    metadata.fail([Fault::RequestLost]);
    assert_eq!(used(), first);
    assert_eq!(used().as_deref(), Some("SECOND"));
    // After they have expired nothing can be sent; but the machine has a role, so this will pass.
    clock.0.store(1_369_353_600 + 12 * 3600, Ordering::Relaxed);
    metadata.fail([Fault::RequestLost]);
    assert!(matches!(store.put("s/1", b"x"), Err(ObjectError::Unavailable(_))));
    keys("THIRD", "2013-05-24T18:00:00Z");
    assert_eq!(used().as_deref(), Some("THIRD"));
}

/// A certificate for 127.0.0.1 by an authority of its own, and a file with it.
fn certificate(directory: &Path) -> (Arc<rustls::ServerConfig>, String) {
    static PROVIDER: OnceLock<()> = OnceLock::new();
    PROVIDER.get_or_init(|| {
        rustls::crypto::ring::default_provider().install_default().expect("the first");
    });
    let names = vec!["127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).expect("it can be made");
    let file = directory.join("ca.pem");
    std::fs::write(&file, made.cert.pem()).expect("it can be written");
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der());
    let config = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key.expect("it is a key"));
    let file = file.to_str().expect("it is text").to_owned();
    (Arc::new(config.expect("it is valid")), file)
}

#[test]
fn an_encrypted_store_is_used_if_its_certificate_is_trusted() {
    let directory = tempfile::tempdir().expect("a directory");
    let (config, file) = certificate(directory.path());
    let (_, other) = {
        let directory = directory.path().join("other");
        std::fs::create_dir(&directory).expect("it can be made");
        certificate(&directory)
    };
    let fake = Fake::start_with(Some(config));
    let with = |file: &str| {
        settings(&fake.url(), &[("AWS_CA_BUNDLE", file)]).map(|settings| open(&settings))
    };
    let trusting = with(&file).expect("it is complete");
    trusting.put("s/1", &[7; 2 << 20]).expect("put");
    assert_eq!(trusting.get("s/1", None), Ok(vec![7; 2 << 20]));
    let error = with(&other).expect("complete").get("s/1", None).expect_err("not trusted");
    assert!(
        matches!(&error, ObjectError::Refused(text) if text.contains("AWS_CA_BUNDLE")),
        "{error:?}"
    );
}
