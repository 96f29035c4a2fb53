//! What leaves the machine in a bundle has no secrets, and no names of files in volumes.
//!
//! A text is cut where a secret may begin: it is better to lose the rest of a line than to send a
//! part of a key. These count as secrets:
//!
//! * what stands in front of the `@` in the host of a URL;
//! * what follows a name such as `secret_access_key`, `passphrase`, `Authorization`, `X-Amz-…` or
//!   `AWS_…` and a `=` or `:`, and what follows `Bearer`, `Basic` or `AWS4-HMAC-SHA256`;
//! * a word that looks like a key: of 16 or more characters of base64 with capitals and digits,
//!   of 32 or more with capitals and small letters, or of 32 or more hexadecimal digits.
//!
//! In a log, absolute paths and fields that have names of files are cut, too. Only behind
//! [`SETUP_FIELDS`] the paths of the set-up stay: a file may be called as a mount point is. Lines
//! below the level INFO are left out: they may have anything.

use serde_json::Value;

/// What stands for what was removed.
pub const REMOVED: &str = "<removed>";
/// A word that contains one of these, without regard to case and with `_` for `-`, names a secret.
const SECRET_WORDS: &[&str] = &[
    "secret",
    "password",
    "passwd",
    "passphrase",
    "token",
    "credential",
    "signature",
    "authorization",
    "access_key",
    "accesskey",
    "api_key",
    "apikey",
    "private_key",
    "x_amz",
    "aws_",
    "cookie",
];
/// Words that a secret follows behind a blank.
const SCHEMES: &[&str] = &["bearer", "basic", "aws4_hmac_sha256"];
/// Fields of the log, and keys of statistics, that have the name of a file.
const NAME_FIELDS: &[&str] = &["name", "path", "paths", "change", "file", "files"];
/// Fields of the log that have a path of the set-up, and never one in a volume.
const SETUP_FIELDS: &[&str] = &["volume=", "mountpoint=", "side="];
/// Levels whose lines stay.
const LEVELS: &[&str] = &["ERROR", "WARN", "INFO"];
/// Levels whose lines are left out.
const LEVELS_OUT: &[&str] = &["DEBUG", "TRACE"];

/// The level is one of the first words of a line, behind the time.
const LEVEL_WORD_MAX: usize = 3;
/// The most bytes of a line that is looked at, which takes time by the square of its length.
/// Another user's daemon may send any.
const LINE_MAX: usize = 4 << 10;
const KEY_MIN: usize = 16;
const LONG_KEY_MIN: usize = 32;

/// Removes secrets from texts.
pub struct Redactor {
    /// Paths of volumes, mount points and directories of daemons, which stay; the longest first.
    paths: Vec<String>,
}

impl Redactor {
    pub fn new(paths: impl IntoIterator<Item = String>) -> Self {
        let mut paths: Vec<_> = paths.into_iter().filter(|path| path.starts_with('/')).collect();
        paths.retain(|path| path != "/");
        paths.sort_by_key(|path| std::cmp::Reverse(path.len()));
        Self { paths }
    }

    /// A text without secrets.
    pub fn text(&self, text: &str) -> String {
        let lines: Vec<String> = text.lines().map(|line| self.line(line, false)).collect();
        lines.join("\n")
    }

    /// The last `lines_max` lines of a log, without secrets and names of files.
    pub fn log(&self, log: &str, lines_max: usize) -> String {
        let first = log.lines().count().saturating_sub(lines_max);
        let (mut out, mut left_out, mut stays) = (String::new(), 0, false);
        for (number, line) in log.lines().map(without_colours).enumerate() {
            // A line without a level goes on with the one before.
            for word in line.split_whitespace().take(LEVEL_WORD_MAX) {
                stays = (stays || LEVELS.contains(&word)) && !LEVELS_OUT.contains(&word);
            }
            let said = stays.then(|| self.line(&line, true));
            // A name may have a line break in it: the next line may go on with it.
            stays = said.as_ref().is_some_and(|said| !said.ends_with(REMOVED));
            match said {
                _ if number < first => {}
                Some(said) => out += &(said + "\n"),
                None => left_out += 1,
            }
        }
        if left_out > 0 {
            out += &format!(
                "({left_out} lines below the level INFO, or of no level, were left out)\n"
            );
        }
        out
    }

    /// The same of all texts in JSON, without the names of files.
    pub fn json(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.text(text).into(),
            Value::Array(items) => items.iter().map(|item| self.json(item)).collect(),
            Value::Object(members) => {
                let members = members.iter().map(|(key, value)| {
                    let names = value.is_string() || value.is_array();
                    let hidden = names && NAME_FIELDS.contains(&key.as_str());
                    let value = if hidden { REMOVED.into() } else { self.json(value) };
                    (self.text(key), value)
                });
                Value::Object(members.collect())
            }
            other => other.clone(),
        }
    }

    /// A line; `is_log`: without paths and names of files.
    fn line(&self, line: &str, is_log: bool) -> String {
        if line.len() > LINE_MAX {
            return REMOVED.into();
        }
        let mut out = String::with_capacity(line.len());
        let mut rest = line;
        while let Some(first) = rest.chars().next() {
            let before = out.chars().next_back();
            let begins = before.is_none_or(|char| !is_word(char));
            let may_stay = if is_log {
                let field = out.strip_suffix('"').unwrap_or(&out);
                SETUP_FIELDS.iter().any(|setup| field.ends_with(setup))
            } else {
                begins && before != Some('/')
            };
            if let Some(path) = self.known(rest).filter(|_| may_stay) {
                out += path;
                rest = &rest[path.len()..];
            } else if let Some(behind) = rest.strip_prefix("://") {
                out += "://";
                rest = without_user(behind, &mut out);
            } else if begins && is_word(first) {
                let word = &rest[..rest.find(|char| !is_word(char)).unwrap_or(rest.len())];
                let behind = &rest[word.len()..];
                // Scrubbing logs the path of a file like this.
                let is_path =
                    word == "damaged" && behind.starts_with(": ") && !out.ends_with("is ");
                if begins_secret(word, behind, is_log) || is_log && is_path {
                    return out + word + " " + REMOVED;
                }
                let run = &rest[..rest.find(|char| !is_base64(char)).unwrap_or(rest.len())];
                if is_key(run) {
                    out += REMOVED;
                    rest = &rest[run.len()..];
                } else {
                    out += word;
                    rest = behind;
                }
            } else if is_log && begins && begins_path(rest) && !matches!(before, Some('/' | '.')) {
                return out + REMOVED;
            } else {
                out.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
        out
    }

    /// The path of the set-up with which a text begins.
    fn known(&self, text: &str) -> Option<&str> {
        let ends = |path: &String| {
            let behind = text.strip_prefix(path.as_str())?;
            behind.chars().next().is_none_or(|char| !is_word(char) && char != '/').then_some(())
        };
        self.paths.iter().find(|path| ends(path).is_some()).map(String::as_str)
    }
}

/// Whether a secret, or a name of a file, follows a word.
fn begins_secret(word: &str, behind: &str, is_log: bool) -> bool {
    let plain = word.to_ascii_lowercase().replace('-', "_");
    if SCHEMES.contains(&plain.as_str()) && behind.starts_with(' ') {
        return true;
    }
    let value = behind.trim_start_matches(['"', '\'', '\\', ' ']);
    if SECRET_WORDS.iter().any(|secret| plain.contains(secret)) {
        return value.starts_with(['=', ':', '%']);
    }
    is_log && behind.starts_with('=') && NAME_FIELDS.contains(&word)
}

fn is_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_' || char == '-'
}

/// Whether a text begins with an absolute path; a slash alone is the root.
fn begins_path(text: &str) -> bool {
    let name = text.strip_prefix('/').and_then(|name| name.chars().next());
    name.is_some_and(|char| !char.is_whitespace() && char != '"')
}

fn is_base64(char: char) -> bool {
    char.is_ascii_alphanumeric() || "+/=_-".contains(char)
}

/// A line of a log without the control sequences for a terminal, which divide its words.
fn without_colours(line: &str) -> String {
    let mut parts = line.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |before, part| {
        before + part.split_once(|char| ('@'..='~').contains(&char)).map_or("", |(_, text)| text)
    })
}

/// Whether a run of base64 characters looks like a key.
fn is_key(run: &str) -> bool {
    let has = |is: fn(&char) -> bool| run.chars().any(|char| is(&char));
    let (capital, small) = (has(char::is_ascii_uppercase), has(char::is_ascii_lowercase));
    let hex = run.chars().all(|char| char.is_ascii_hexdigit());
    run.len() >= KEY_MIN && capital && has(char::is_ascii_digit)
        || run.len() >= LONG_KEY_MIN && (capital && small || hex)
}

/// What follows `://`: copies the host, without a user and a password in front of it; returns what
/// was not looked at.
fn without_user<'t>(behind: &'t str, out: &mut String) -> &'t str {
    let end = behind.find(|char: char| char.is_whitespace() || "\"'<>,".contains(char));
    let url = &behind[..end.unwrap_or(behind.len())];
    let host = &url[..url.find(['/', '?', '#']).unwrap_or(url.len())];
    // A password may have a slash in it. What follows a host and `:` is a number.
    let odd = host.split_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_err());
    let odd = odd && !host.starts_with('[');
    let user = host.rfind('@').or_else(|| url.rfind('@').filter(|_| odd));
    let Some(at) = user else { return behind };
    *out += REMOVED;
    &behind[at..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::object;

    fn redactor() -> Redactor {
        let paths = ["/srv/Data2026/my volume.ferry", "/mnt", "/", "s3://bucket"];
        Redactor::new(paths.map(str::to_owned))
    }

    #[test]
    fn secrets_are_cut_wherever_they_stand() {
        for secret in [
            "keys AKIAIOSFODNN7EXAMPLE and more",
            "key=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            "0123456789abcdef0123456789abcdef",
            "QWxhZGRpbjpvcGVuIHNlc2FtZVNlc2FtZQ==",
            "https://EXAMPLE:hunter@host/a",
            "https://user:EXAMPLE@host/a",
            "https://EXAMPLE@host",
            "http://user:pa/EXAMPLE@host/a?b",
            "ferry://user:EXAMPLE@host:7373/",
            "https://host/a?X-Amz-Signature=EXAMPLE&x",
            "https://host/a?X-Amz-Credential=EXAMPLE%2F2026",
            "Authorization: AWS4-HMAC-SHA256 Credential=EXAMPLE",
            "authorization: Basic EXAMPLE",
            "headers {\"authorization\": \"EXAMPLE\"}",
            "x-amz-security-token: EXAMPLE",
            "AWS_SECRET_ACCESS_KEY=EXAMPLE",
            "AWS_PROFILE=EXAMPLE",
            "env {\"AWS_ACCESS_KEY_ID\": \"EXAMPLE\"}",
            "aws_secret_access_key = EXAMPLE",
            "passphrase: EXAMPLE",
            "the passphrase is 'x', password=\"EXAMPLE with blanks EXAMPLE\"",
            "secret%3DEXAMPLE",
            "sent Bearer EXAMPLE",
        ] {
            let said = redactor().text(secret);
            assert!(said.contains(REMOVED), "{secret}: {said}");
            for part in ["EXAMPLE", "hunter", "wJalr", "K7MDENG", "cdef", "2026"] {
                assert!(!said.contains(part), "{secret}: {said}");
            }
        }
    }

    #[test]
    fn what_is_no_secret_stays() {
        for text in [
            "2026-11-28T07:46:57.571892Z  INFO ferry::daemon: mounted volume=\"/srv/Data2026/my volume.ferry\" mountpoint=/mnt",
            "id bd63f556-1fc8-d7e6-4bc3-e29731f3aea2, 12 requests",
            "s3://bucket/prefix@before?endpoint=http://127.0.0.1:9000&profile=work",
            "ferry://[::1]:7373/ is away",
            "dir:///srv/store: 3 objects",
            "the passphrase is wrong",
            "the mirror reads again side=\"/srv/Data2026/my volume.ferry\" offset=0",
            "the log is damaged: what was changed last is missing",
        ] {
            assert_eq!(redactor().line(text, true), text);
        }
        let mount = "42 27 0:39 / /mnt rw,relatime - fuse.ferry ferry://host:7373/ rw,user_id=0";
        assert_eq!(redactor().text(mount), mount);
    }

    #[test]
    fn a_file_that_is_called_as_the_set_up_is_has_no_name_in_a_log() {
        let redactor = Redactor::new(["/photos", "/dev/sdb"].map(str::to_owned));
        for line in [
            "/dev/wedding: cannot open",
            "/proc/wedding: cannot open",
            "/photos 2024/wedding.jpg: cannot open",
            "/photos.old/wedding.jpg: cannot open",
            "cannot open path=/photos 2024/wedding.jpg",
            "cannot open name=\"/dev/wedding.jpg\"",
            "damaged: / wedding.jpg, 4096 bytes at 0: checksum",
            "damaged: /a\nwedding.jpg: checksum\nwedding",
        ] {
            let log = format!("2026-11-28T07:46:57Z ERROR ferry: {line}\n");
            let said = redactor.log(&log, 200);
            assert!(!said.contains("wedding") && said.contains("ERROR ferry: "), "{said}");
        }
    }

    #[test]
    fn a_line_that_takes_long_to_look_at_is_removed() {
        let line = "a+".repeat(4 << 20);
        assert_eq!(redactor().text(&line), REMOVED);
    }

    #[test]
    fn a_log_has_no_names_of_files() {
        let log = "\
2026-11-28T07:46:57Z  INFO ferry: mounted volume=/mnt\n\
2026-11-28T07:46:57Z ERROR ferry: data is damaged inode=7 name=\"wedding.jpg\" offset=0\n\
2026-11-28T07:46:57Z ERROR ferry: lost change=\"rename /a b/wedding to /c\"\n\
2026-11-28T07:46:57Z  WARN ferry: connected path=/home/wedding x\n\
2026-11-28T07:46:57Z  WARN ferry: /mnt/wedding photos: cannot open\n\
2026-11-28T07:46:57Z  WARN ferry: lost (inode 7)/wedding\n\
2026-11-28T07:46:57Z DEBUG ferry: lookup wedding\n\
of wedding\n\
\u{1b}[2m2026-11-28T07:46:58Z\u{1b}[0m \u{1b}[31mERROR\u{1b}[0m ferry: \u{1b}[3mname\u{1b}[0m\u{1b}[2m=\u{1b}[0m\"wedding\"\n\
2026-11-28T07:46:58Z  INFO ferry: done\n";
        let said = redactor().log(log, 200);
        assert!(!said.contains("wedding"), "{said}");
        assert!(said.contains("volume=/mnt\n") && said.contains("INFO ferry: done\n"), "{said}");
        assert!(said.contains("inode=7 name <removed>") && said.contains("(2 lines"), "{said}");
        assert_eq!(redactor().log(log, 1).lines().count(), 1);
        let broken = "2026-11-28T07:46:57Z ERROR ferry: damaged: /a\nwedding\n";
        assert!(!redactor().log(broken, 1).contains("wedding"));
    }

    #[test]
    fn texts_in_json_are_cut_and_numbers_stay() {
        let secret = "GET https://a:b@host: passphrase=x";
        let figures = object([
            ("error", secret.into()),
            ("count", 7.into()),
            ("paths", vec!["/wedding"].into()),
            ("/dev/sdb", object([("reason", secret.into())])),
        ]);
        let expected = "GET https://<removed>@host: passphrase <removed>";
        let said = redactor().json(&figures);
        assert_eq!(said["error"], expected);
        assert_eq!(said["/dev/sdb"]["reason"], expected);
        assert_eq!((&said["count"], &said["paths"]), (&7.into(), &REMOVED.into()));
    }
}
