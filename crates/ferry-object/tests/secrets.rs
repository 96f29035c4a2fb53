//! No log line holds a secret, however much is logged. The only test of its program: the log is
//! the whole process's.

#[expect(dead_code, reason = "the other program uses all of it")]
mod fake;

use fake::{BUCKET, Fake, Fault};
use ferry_env::Env;
use ferry_object::{ObjectError, S3Settings, S3Store, Store};
use std::io::Write;
use std::sync::{Arc, Mutex};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("nobody panics").extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn no_log_line_holds_a_secret() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .init();
    let (fake, metadata) = (Fake::start(), Fake::start());
    let role = "/latest/meta-data/iam/security-credentials/";
    metadata.page("/latest/api/token", "secret-session");
    metadata.page(role, "role");
    metadata.page(
        &format!("{role}role"),
        r#"{"AccessKeyId":"KEYID","SecretAccessKey":"secret-key","Token":"secret-token"}"#,
    );
    let settings = S3Settings::from_variables(Some(&fake.url()), &|name| match name {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT" => Some(metadata.url()),
        "HOME" => Some("/nonexistent".into()),
        _ => None,
    });
    let settings = settings.expect("they are complete");
    let location = format!("s3://{BUCKET}/vol").parse().expect("it is a location");
    let store = S3Store::open(&location, &settings, &Env::real()).expect("they are complete");
    store.put("s/1", b"x").expect("put");
    for fault in [
        Fault::RequestLost,
        Fault::Raw("garbage".into()),
        Fault::error(403, "SignatureDoesNotMatch"),
        Fault::error(400, "ExpiredToken"),
        Fault::error(503, "SlowDown"),
    ] {
        fake.fail([fault]);
        let error: Option<ObjectError> = store.create("s/2", b"x").err();
        tracing::info!(?error, "created");
        store.delete("s/2").expect("delete");
    }
    tracing::info!(?settings, "settings");
    let log = String::from_utf8(log.0.lock().expect("nobody panics").clone()).expect("text");
    assert!(log.contains("SlowDown") && log.contains("ureq"), "everything is logged: {log}");
    // A dump of bytes breaks its lines anywhere.
    for line in log.lines() {
        let found =
            ["secret-", "Signature=", "SecretAccessKey"].iter().find(|text| line.contains(**text));
        assert_eq!(found, None, "{line}");
    }
    assert!(!log.contains("HTTP/1.1.2"), "bytes are logged: {log}");
}
