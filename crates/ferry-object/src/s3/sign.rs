//! Signatures of requests: AWS Signature Version 4, with the parts in headers.
//!
//! Every header that decides what a request does is signed, and so is the checksum of its body. So
//! whatever changes them on the way (a proxy that drops `If-None-Match`, a damaged byte) makes the
//! store refuse the request.

use super::keys::Keys;
use super::time::stamp;
use ring::{digest, hmac};
use std::fmt::Write;

/// What is signed.
pub(super) struct Unsigned<'a> {
    pub method: &'a str,
    pub host: &'a str,
    /// Encoded.
    pub path: &'a str,
    /// Names and values, not encoded.
    pub query: &'a [(&'a str, &'a str)],
    /// Headers with names in lower case; those that this module adds are left out.
    pub headers: &'a [(&'static str, String)],
    pub body: &'a [u8],
    /// Seconds since the Unix epoch.
    pub time: u64,
    pub region: &'a str,
}

/// The headers that the request is sent with: its own, and those of the signature.
pub(super) fn sign(request: &Unsigned<'_>, keys: &Keys) -> Vec<(&'static str, String)> {
    let time = stamp(request.time);
    let checksum = hex(digest::digest(&digest::SHA256, request.body).as_ref());
    let mut headers = request.headers.to_vec();
    headers.push(("host", request.host.into()));
    headers.push(("x-amz-date", time.clone()));
    headers.push(("x-amz-content-sha256", checksum.clone()));
    if let Some(token) = &keys.token {
        headers.push(("x-amz-security-token", token.clone()));
    }
    headers.sort_unstable();
    let names: Vec<_> = headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");

    let mut canonical = format!("{}\n{}\n{}\n", request.method, request.path, query(request.query));
    for (name, value) in &headers {
        writeln!(canonical, "{name}:{}", value.trim()).expect("a string takes it");
    }
    write!(canonical, "\n{names}\n{checksum}").expect("a string takes it");

    let scope = format!("{}/{}/s3/aws4_request", &time[..8], request.region);
    let canonical = hex(digest::digest(&digest::SHA256, canonical.as_bytes()).as_ref());
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{canonical}");
    let mut key = Vec::from(format!("AWS4{}", keys.secret));
    for part in [&time[..8], request.region, "s3", "aws4_request"] {
        key = mac(&key, part);
    }
    let signature = hex(&mac(&key, &text));
    let id = &keys.id;
    let value = format!(
        "AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}"
    );
    headers.push(("authorization", value));
    headers
}

/// The query of a URL, as the signature has it: names in ascending order.
pub(super) fn query(pairs: &[(&str, &str)]) -> String {
    let mut pairs: Vec<_> =
        pairs.iter().map(|(name, value)| (encode(name, false), encode(value, false))).collect();
    pairs.sort_unstable();
    let pairs: Vec<_> = pairs.iter().map(|(name, value)| format!("{name}={value}")).collect();
    pairs.join("&")
}

/// Text as URLs have it: all but letters, digits and `-._~` as `%XX`, and slashes as they are if
/// `slashes` says so.
pub(super) fn encode(text: &str, slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for &byte in text.as_bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte.into());
            }
            b'/' if slashes => out.push('/'),
            _ => write!(out, "%{byte:02X}").expect("a string takes it"),
        }
    }
    out
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        write!(out, "{byte:02x}").expect("a string takes it");
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of "Authenticating Requests: Using the Authorization Header" in the S3 manual.
    #[test]
    fn signatures_are_those_of_the_manual() {
        let keys = Keys {
            id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            token: None,
            expires: None,
        };
        let request = Unsigned {
            method: "GET",
            host: "examplebucket.s3.amazonaws.com",
            path: "/",
            query: &[],
            headers: &[],
            body: b"",
            time: 1_369_353_600,
            region: "us-east-1",
        };
        let signature = |request: &Unsigned<'_>| {
            let headers = sign(request, &keys);
            let (_, value) = headers.last().expect("there is one");
            value.rsplit_once('=').expect("it ends with the signature").1.to_owned()
        };
        let range = [("range", "bytes=0-9".to_owned())];
        assert_eq!(
            signature(&Unsigned { path: "/test.txt", headers: &range, ..request }),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
        let class = [
            ("date", "Fri, 24 May 2013 00:00:00 GMT".to_owned()),
            ("x-amz-storage-class", "REDUCED_REDUNDANCY".to_owned()),
        ];
        let path = format!("/{}", encode("test$file.text", true));
        let body = b"Welcome to Amazon S3.";
        assert_eq!(
            signature(&Unsigned { method: "PUT", path: &path, headers: &class, body, ..request }),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"
        );
        assert_eq!(
            signature(&Unsigned { query: &[("lifecycle", "")], ..request }),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
        );
        assert_eq!(
            signature(&Unsigned { query: &[("prefix", "J"), ("max-keys", "2")], ..request }),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
        );
    }

    #[test]
    fn names_are_encoded_as_the_store_does_it() {
        assert_eq!(encode("a/b c+ä", true), "a/b%20c%2B%C3%A4");
        assert_eq!(encode("a/b", false), "a%2Fb");
    }
}
