//! A network that limits, delays, holds back and cuts, for the suites: `relay --listen 127.0.0.1:P
//! --to 127.0.0.1:Q [--up 10Mbit] [--down 10Mbit] [--delay 1ms] [--cut-after BYTES]`
//!
//! `--delay` is that of each direction. It says where it listens, then takes commands from its
//! input, one a line, and answers each with a line: `cut`, `cut-after BYTES`, `hold up|down`,
//! `release up|down`, `up RATE`, `down RATE`, `delay MILLISECONDSms`, `refuse`, `accept`, `carried`
//! (bytes up and down). It goes on when its input ends.

use std::io::BufRead;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use ferry_bench::relay::{Relay, Side, Way};

const USAGE: &str = "relay --listen ADDRESS:PORT --to ADDRESS:PORT [--up RATE] [--down RATE] [--delay 1ms] [--cut-after BYTES]";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("relay: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let (mut listen, mut to, mut cut_after) = (None, None, None);
    let (mut up, mut down) = (Way::default(), Way::default());
    let mut arguments = std::env::args().skip(1);
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or(USAGE)?;
        match option.as_str() {
            "--listen" => listen = Some(parse::<SocketAddr>(&value)?),
            "--to" => to = Some(parse::<SocketAddr>(&value)?),
            "--up" => up.rate = value.parse()?,
            "--down" => down.rate = value.parse()?,
            "--delay" => (up.delay, down.delay) = (delay(&value)?, delay(&value)?),
            "--cut-after" => cut_after = Some(parse(&value)?),
            _ => return Err(USAGE.into()),
        }
    }
    let relay = Relay::start(listen.ok_or(USAGE)?, to.ok_or(USAGE)?, up, down)
        .map_err(|error| format!("cannot listen: {error}"))?;
    if let Some(bytes) = cut_after {
        relay.cut_after(bytes);
    }
    println!("listening on {}", relay.address());
    for line in std::io::stdin().lock().lines() {
        match obey(&relay, &line.map_err(|error| error.to_string())?) {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("error: {error}"),
        }
    }
    loop {
        std::thread::park();
    }
}

fn obey(relay: &Relay, command: &str) -> Result<String, String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let side = |name: &str| match name {
        "up" => Ok(Side::Up),
        "down" => Ok(Side::Down),
        _ => Err(format!("{name:?} is neither up nor down")),
    };
    match words[..] {
        ["cut"] => relay.cut(),
        ["cut-after", bytes] => relay.cut_after(parse(bytes)?),
        ["hold", name] => relay.hold(side(name)?, true),
        ["release", name] => relay.hold(side(name)?, false),
        ["delay", time] => {
            let delay = delay(time)?;
            [Side::Up, Side::Down]
                .iter()
                .for_each(|side| relay.set(*side, |way| way.delay = delay));
        }
        [name @ ("up" | "down"), rate] => {
            let rate = rate.parse()?;
            relay.set(side(name)?, |way| way.rate = rate);
        }
        ["refuse"] => relay.refuse(true),
        ["accept"] => relay.refuse(false),
        ["carried"] => {
            return Ok(format!("{} {}", relay.carried(Side::Up), relay.carried(Side::Down)));
        }
        _ => return Err(format!("{command:?} is no command")),
    }
    Ok("ok".into())
}

fn delay(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no delay: write 20ms, or 500us");
    let (number, unit) = match (text.strip_suffix("ms"), text.strip_suffix("us")) {
        (Some(number), _) => (number, 1000),
        (_, Some(number)) => (number, 1),
        _ => return Err(wrong()),
    };
    number.parse::<u64>().map(|number| Duration::from_micros(number * unit)).map_err(|_| wrong())
}

fn parse<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text:?} is not understood: {USAGE}"))
}
