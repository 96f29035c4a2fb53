use std::collections::BTreeSet;

use super::*;
use crate::frame::encode;
use ferry_env::Env;
use ferry_fs::RenameFlags;
use proptest::prelude::*;

/// Each message of protocol 8 once, each operation, and each outcome. The codec of release 0.1.0
/// has made the bytes.
const GOLDEN: &str = include_str!("protocol-8.txt");

/// The golden messages of one side: names and bytes.
fn golden(side: &str) -> Vec<(&'static str, Vec<u8>)> {
    let byte = |at: usize, hex: &str| {
        u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal digits")
    };
    let bytes = |hex: &str| (0..hex.len()).step_by(2).map(|at| byte(at, hex)).collect();
    let messages = GOLDEN.lines().filter_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[0] == side).then(|| (words[1], bytes(words[2])))
    });
    messages.collect()
}

fn message(side: &str, name: &str) -> Vec<u8> {
    golden(side).into_iter().find(|(other, _)| *other == name).expect(name).1
}

fn welcome() -> ToClient {
    Protocol::V8.decode_server(&message("server", "Welcome"), || None).expect("a welcome")
}

/// What a client sends on a new connection of protocol 8, and its pings.
fn client() -> (Outbound, Pings) {
    Protocol::V8.of_client(&welcome(), &Env::real().clock)
}

/// One message as it is sent.
fn sent(outbound: &mut Outbound, message: &impl Wire) -> Vec<u8> {
    let (frames, _) = outbound.translate(encode(message), true);
    frames.get(4..).unwrap_or_default().to_vec()
}

fn asked() -> Option<(u64, Timestamp)> {
    Some((7, Timestamp(9)))
}

#[test]
fn messages_of_protocol_8_are_decoded_and_encoded_to_the_same_bytes() {
    let (mut tags, mut ops) = (BTreeSet::new(), BTreeSet::new());
    for (name, bytes) in golden("client") {
        let message = Protocol::V8.decode_client(&bytes).expect(name);
        let (mut client, _pings) = client();
        if let ToServer::Returned { after, .. } = message {
            let Outbound::Client8(client) = &mut client else { panic!("not of protocol 8") };
            client.sent = after;
        }
        assert_eq!(sent(&mut client, &message), bytes, "{name}: {message:?}");
        tags.insert(bytes[0]);
        if let ToServer::Request { op, .. } | ToServer::Change { op, .. } = &message {
            let mut encoded = Vec::new();
            op.put(&mut encoded);
            ops.insert(encoded[0]);
        }
    }
    assert_eq!(tags, (1..=7).collect());
    assert_eq!(ops, (1..=19).chain(32..=57).collect());

    let (mut tags, mut outcomes) = (BTreeSet::new(), BTreeSet::new());
    for (name, bytes) in golden("server") {
        let message = Protocol::V8.decode_server(&bytes, asked).expect(name);
        assert_eq!(sent(&mut Protocol::V8.of_server(), &message), bytes, "{name}: {message:?}");
        tags.insert(bytes[0]);
        if let ToClient::Reply { .. } = message {
            outcomes.insert(bytes[10]);
        }
    }
    assert_eq!(tags, (1..=11).collect());
    assert_eq!(outcomes, (1..=15).chain([18]).collect());
}

#[test]
fn messages_of_the_newest_protocol_are_none_of_protocol_8() {
    let ping = encode(&ToServer::Ping { number: 1 });
    assert_eq!(Protocol::V8.decode_client(&ping[4..]), Err(Malformed));
    let (renewed, epoch, durable, now) = (true, 1, 2, Timestamp(3));
    for message in [
        ToClient::Pong { number: 1, renewed, epoch, durable, now },
        ToClient::Evicted { reason: b"why".to_vec() },
        ToClient::Lack {},
        ToClient::Fatal { seq: 4 },
    ] {
        let bytes = encode(&message);
        assert_eq!(Protocol::V8.decode_server(&bytes[4..], asked), Err(Malformed), "{message:?}");
        assert_eq!(Protocol::V10.decode_server(&bytes[4..], || None), Ok(message));
    }
    // The answer to a ping that was not sent.
    assert_eq!(Protocol::V8.decode_server(&message("server", "Pong"), || None), Err(Malformed));
}

#[test]
fn what_a_server_cannot_say_in_protocol_8_has_a_substitute() {
    let mut server = Protocol::V8.of_server();
    let fatal = sent(&mut server, &ToClient::Fatal { seq: 4 });
    let answer = Protocol::V8.decode_server(&fatal, || None).expect("an answer");
    let ToClient::Changed { seq: 4, outcome, made: None, .. } = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(outcome, Outcome::Failed { errno: libc::EIO });
    // A message without a counterpart is left out; those around it are not.
    let around = encode(&ToClient::Goodbye {});
    let frames = [&around[..], &encode(&ToClient::Lack {}), &around].concat();
    assert_eq!(server.translate(frames, true), ([&around[..], &around].concat(), false));
    assert!(server.translate(encode(&ToClient::Lack {}), true).0.is_empty());
}

fn change(seq: u64, op: Op) -> ToServer {
    let (answered, epoch, acknowledged, caller) = (0, 0, None, Caller::default());
    ToServer::Change { seq, answered, epoch, acknowledged, caller, op }
}

#[test]
fn a_whiteout_becomes_flags_that_every_server_refuses() {
    let flags = RenameFlags { whiteout: true, ..RenameFlags::default() };
    let (name, new_name) = (b"a".to_vec(), b"b".to_vec());
    let rename = change(9, Op::Rename { parent: 1, name, new_parent: 1, new_name, flags });
    let bytes = sent(&mut client().0, &rename);
    let Ok(ToServer::Change { op: Op::Rename { flags, .. }, .. }) =
        Protocol::V8.decode_client(&bytes)
    else {
        panic!("no rename")
    };
    assert_eq!(flags, RenameFlags { no_replace: true, exchange: true, whiteout: false });
}

#[test]
fn leases_are_returned_behind_the_change_that_they_wait_for() {
    let (mut client, _pings) = client();
    let ToClient::Welcome { applied, .. } = welcome() else { panic!("no welcome") };
    let returned = |after| encode(&ToServer::Returned { inodes: List(vec![5]), after });
    // The server knows that change.
    assert_eq!(client.translate(returned(applied), true), (returned(applied), false));
    assert!(client.translate(returned(applied + 2), true).0.is_empty());
    let changes: Vec<_> = (1..=3).map(|n| encode(&change(applied + n, Op::Nothing {}))).collect();
    assert_eq!(client.translate(changes[0].clone(), false), (changes[0].clone(), false));
    let both = [changes[1].clone(), returned(applied + 2)].concat();
    assert_eq!(client.translate(changes[1].clone(), false), (both, false));
    assert_eq!(client.translate(changes[2].clone(), false).0, changes[2]);
    assert_eq!(client.translate(returned(applied + 3), true).0, returned(applied + 3));
}

#[test]
fn answers_belong_to_pings_in_order_and_no_ping_stays_without_one() {
    let (mut client, pings) = client();
    let mut arrived = 0;
    for number in 1..=PINGS_MAX as u64 + 5 {
        let (ping, first) = client.translate(encode(&ToServer::Ping { number }), true);
        assert!(first, "it waits for no change");
        arrived += usize::from(!ping.is_empty());
    }
    assert_eq!(arrived, PINGS_MAX);
    let ToClient::Welcome { now: welcomed, .. } = welcome() else { panic!("no welcome") };
    for expected in 1..=PINGS_MAX as u64 {
        let pong = Protocol::V8.decode_server(&message("server", "Pong"), || pings.answered());
        let Ok(ToClient::Pong { number, now, .. }) = pong else { panic!("no answer") };
        assert_eq!(number, expected);
        assert!(now >= welcomed);
    }
    assert!(pings.answered().is_none());
    assert!(!client.translate(encode(&ToServer::Ping { number: 99 }), true).0.is_empty());
    assert_eq!(pings.answered().map(|(number, _)| number), Some(99));
}

#[test]
fn only_the_refusal_of_the_release_before_is_answered_with_its_protocol() {
    let refused = |reason: &str| ToClient::Refused { reason: reason.into() };
    let before = refused(
        "the client speaks version 10 of the protocol, the server 8: install the same FerryFS on both",
    );
    assert_eq!(Protocol::V10.instead(&before), Some(Protocol::V8));
    assert_eq!(Protocol::V8.instead(&before), None);
    for other in [
        refused("the client speaks version 10 of the protocol, the server 8 and 11: install …"),
        refused("the client speaks version 10 of the protocol, the server 80: install …"),
        refused("the server stops"),
        ToClient::Goodbye {},
    ] {
        assert_eq!(Protocol::V10.instead(&other), None, "{other:?}");
    }
}

/// Bytes that look like messages, behind a tag.
fn likely() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![4 => Just(0_u8), 3 => 0_u8..16, 2 => 32_u8..58, 1 => any::<u8>()];
    (0_u8..16, proptest::collection::vec(byte, 0..200))
        .prop_map(|(tag, rest)| [&[tag][..], &rest].concat())
}

/// A golden message with some bytes changed, and cut off or longer.
fn nearly(side: &'static str) -> impl Strategy<Value = Vec<u8>> {
    let changes = proptest::collection::vec((any::<usize>(), any::<u8>()), 0..3);
    (0..golden(side).len(), changes, any::<usize>(), 0_usize..4).prop_map(
        move |(which, changes, len, how)| {
            let mut bytes = golden(side)[which].1.clone();
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            match how {
                0 => bytes.truncate(len % (bytes.len() + 1)),
                1 => bytes.push(len as u8),
                _ => {}
            }
            bytes
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_a_message_of_protocol_8_or_an_error(
        up in prop_oneof![likely(), nearly("client")],
        down in prop_oneof![likely(), nearly("server")],
    ) {
        if let Ok(message) = Protocol::V8.decode_client(&up) {
            let (mut client, _pings) = client();
            let Outbound::Client8(client8) = &mut client else { panic!("not of protocol 8") };
            client8.sent = u64::MAX;
            prop_assert_eq!(sent(&mut client, &message), up, "{:?}", message);
        }
        if let Ok(message) = Protocol::V8.decode_server(&down, asked) {
            prop_assert_eq!(sent(&mut Protocol::V8.of_server(), &message), down, "{:?}", message);
        }
    }
}
