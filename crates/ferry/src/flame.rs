//! Draws a flame graph: what was seen as a tree of frames, each as wide as it was frequent, and
//! what is inside a frame above it. One SVG without a script; a browser shows the numbers of the
//! frame that the pointer is on.

use std::collections::BTreeMap;
use std::fmt::Write;

/// The width of all, and the height of a frame, in pixels.
const WIDTH: f64 = 1200.0;
const ROW: f64 = 18.0;
/// What is above and below the frames.
const MARGIN: f64 = 28.0;
/// A character of the text, about.
const CHARACTER: f64 = 6.6;
/// Narrower frames are left out: nobody would see them.
const WIDTH_MIN: f64 = 0.3;

/// What was seen of an operation or a layer, and of the layers inside.
#[derive(Debug, Default, PartialEq)]
pub struct Frame {
    /// How often it was seen, with all layers inside.
    pub count: u64,
    /// The layers inside, by name.
    pub inside: BTreeMap<String, Frame>,
}

impl Frame {
    /// Adds what was seen inside, the outermost name first.
    pub fn add(&mut self, names: &[String], count: u64) {
        self.count += count;
        if let Some((first, rest)) = names.split_first() {
            self.inside.entry(first.clone()).or_default().add(rest, count);
        }
    }

    /// How often it was seen in no layer inside.
    pub fn own(&self) -> u64 {
        self.count - self.inside.values().map(|frame| frame.count).sum::<u64>()
    }

    /// What is inside, the most frequent first.
    pub fn ranked(&self) -> Vec<(&String, &Self)> {
        let mut all: Vec<_> = self.inside.iter().collect();
        all.sort_by_key(|(_, frame)| std::cmp::Reverse(frame.count));
        all
    }
}

/// An SVG of the frames inside `all`. Each sample counts what was seen at one moment.
pub fn draw(title: &str, samples: u64, all: &Frame) -> String {
    let rows = depth(all) as f64;
    let height = 2.0 * MARGIN + rows * ROW;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"4\" y=\"17\" font-size=\"13\">{}</text>\n",
        escaped(title)
    );
    if all.count == 0 {
        let _ = writeln!(svg, "<text x=\"4\" y=\"{}\">idle: nothing was seen</text>", MARGIN + ROW);
    }
    let drawing = Drawing {
        scale: WIDTH / all.count.max(1) as f64,
        bottom: height - MARGIN,
        samples: samples.max(1),
        whole: all.count,
    };
    drawing.frames(&mut svg, all, 0.0, 0);
    svg.push_str("</svg>\n");
    svg
}

fn depth(frame: &Frame) -> usize {
    frame.inside.values().map(|inside| 1 + depth(inside)).max().unwrap_or_default()
}

struct Drawing {
    /// Pixels of one count.
    scale: f64,
    bottom: f64,
    samples: u64,
    whole: u64,
}

impl Drawing {
    /// Draws what is inside a frame that begins at `x`, in a row counted from the bottom.
    fn frames(&self, svg: &mut String, frame: &Frame, x: f64, row: usize) {
        let mut x = x;
        for (name, inside) in frame.ranked() {
            let width = inside.count as f64 * self.scale;
            if width >= WIDTH_MIN {
                self.frame(svg, (name, inside.count), (x, width), row);
                self.frames(svg, inside, x, row + 1);
            }
            x += width;
        }
    }

    fn frame(
        &self,
        svg: &mut String,
        (name, count): (&str, u64),
        (x, width): (f64, f64),
        row: usize,
    ) {
        let y = self.bottom - (row + 1) as f64 * ROW;
        let share = count as f64 / self.whole as f64 * 100.0;
        let time = count as f64 / self.samples as f64 * 1000.0;
        let room = ((width - 6.0) / CHARACTER).max(0.0) as usize;
        let label = if room < 3 { String::new() } else { shortened(name, room) };
        let _ = writeln!(
            svg,
            "<g><title>{name}: {share:.1} %, {time:.1} ms/s</title>\
             <rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"2\" fill=\"{}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text></g>",
            (width - 0.5).max(0.1),
            ROW - 1.0,
            colour(name),
            x + 3.0,
            y + 12.5,
            escaped(&label),
            name = escaped(name),
        );
    }
}

/// The device and the network are blue, waits are grey, all else has a warm colour that follows
/// from its name.
fn colour(name: &str) -> String {
    if name.starts_with("wait for") || name == "commit" {
        return "#c5cad3".into();
    }
    if name.starts_with("device") || name.starts_with("store") {
        return "#8fb8e8".into();
    }
    let sum = name.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    format!("hsl({}, 85%, {}%)", 18 + sum % 36, 66 + sum / 36 % 10)
}

fn shortened(name: &str, room: usize) -> String {
    if name.chars().count() <= room {
        return name.into();
    }
    name.chars().take(room - 1).chain(['…']).collect()
}

/// Text for XML. Control characters, which XML does not allow, are replaced.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            char if char.is_control() || matches!(char, '\u{fffe}' | '\u{ffff}') => {
                out.push('\u{fffd}')
            }
            char => out.push(char),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(count: u64, inside: impl IntoIterator<Item = (&'static str, Frame)>) -> Frame {
        let inside = inside.into_iter().map(|(name, frame)| (name.to_owned(), frame)).collect();
        Frame { count, inside }
    }

    #[test]
    fn a_frame_is_as_wide_as_it_was_frequent_and_has_its_numbers_in_a_title() {
        let create = frame(300, [("file system", frame(100, []))]);
        let svg =
            draw("a mount", 200, &frame(400, [("create", create), ("fsync", frame(100, []))]));
        for text in [
            "<title>create: 75.0 %, 1500.0 ms/s</title><rect x=\"0.0\" y=\"46.0\" width=\"899.5\"",
            "<title>fsync: 25.0 %, 500.0 ms/s</title><rect x=\"900.0\" y=\"46.0\" width=\"299.5\"",
            "<title>file system: 25.0 %, 500.0 ms/s</title><rect x=\"0.0\" y=\"28.0\" width=\"299.5\"",
        ] {
            assert!(svg.contains(text), "{text} is missing in {svg}");
        }
    }

    #[test]
    fn text_is_escaped_and_cut_where_a_frame_is_narrow() {
        let names = frame(1000, [("wide", frame(970, [])), ("write-back", frame(30, []))]);
        let svg = draw("<&\"\u{7}>", 1, &names);
        assert!(svg.contains(">&lt;&amp;&quot;\u{fffd}&gt;</text>"), "{svg}");
        assert!(svg.contains(">writ…</text>") || svg.contains(">wri…</text>"), "{svg}");
        assert_eq!(svg.matches("<g>").count(), 2);
    }

    #[test]
    fn what_nobody_would_see_is_left_out_and_an_idle_daemon_says_so() {
        let svg =
            draw("", 1, &frame(10_000, [("create", frame(9_999, [])), ("open", frame(1, []))]));
        assert!(svg.contains("create") && !svg.contains("open"), "{svg}");
        assert!(draw("", 1, &Frame::default()).contains("idle"));
    }
}
