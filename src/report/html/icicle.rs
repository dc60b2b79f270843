//! Memory at a peak, planned or reserved, as an icicle: spaces, roles, and parts by their dotted names. Nested boxes
//! whose widths are their bytes. A script zooms into a box on click; without it, every box is readable.

use std::fmt::Write;

use super::escape;
use crate::base::{MemorySpace, Role};
use crate::planner::MemoryPlan;
use crate::report::text;

/// Boxes below this fraction of the whole are joined.
const MIN_FRACTION: f64 = 0.002;

#[derive(Debug, Default, PartialEq)]
struct Frame {
    name: String,
    bytes: u64,
    children: Vec<Frame>,
}

impl Frame {
    fn add(&mut self, path: &[&str], bytes: u64) {
        self.bytes += bytes;
        let Some((name, rest)) = path.split_first() else { return };
        let at = match self.children.iter().position(|child| child.name == *name) {
            Some(at) => at,
            None => {
                self.children.push(Frame { name: (*name).to_owned(), ..Frame::default() });
                self.children.len() - 1
            }
        };
        self.children[at].add(rest, bytes);
    }

    /// Largest first; small ones joined; a box with one child of its size takes that child's place.
    fn arrange(&mut self, smallest: u64) {
        self.children.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.name.cmp(&b.name)));
        let small = self.children.partition_point(|child| child.bytes >= smallest);
        let joined = self.children.split_off(small);
        match joined.len() {
            0 => {}
            1 => self.children.extend(joined),
            n => {
                let bytes = joined.iter().map(|child| child.bytes).sum();
                self.children.push(Frame { name: format!("{n} smaller"), bytes, children: Vec::new() });
            }
        }
        self.children.iter_mut().for_each(|child| child.arrange(smallest));
        if let [only] = self.children.as_mut_slice()
            && only.bytes == self.bytes
            && !self.name.is_empty()
        {
            self.name = format!("{}.{}", self.name, only.name);
            self.children = std::mem::take(&mut only.children);
        }
    }

    fn html(&self, whole: u64, depth: usize, out: &mut String) {
        let (name, bytes) = (escape(&self.name), text::bytes(self.bytes));
        let fraction = text::percent(self.bytes as f64, whole as f64);
        let _ = write!(
            out,
            "<div class=\"box d{}\" style=\"flex-grow:{}\"><button title=\"{name}: {bytes}, {fraction}\">\
             {name} <small>{bytes}</small></button>",
            depth.min(4),
            self.bytes.max(1)
        );
        if !self.children.is_empty() {
            out.push_str("<div class=row>");
            self.children.iter().for_each(|child| child.html(whole, depth + 1, out));
            out.push_str("</div>");
        }
        out.push_str("</div>");
    }
}

/// The icicle of a memory space with these parts, each with its role and name; `None` if they have no bytes.
pub fn html_of<'a>(space: &str, parts: impl Iterator<Item = (Role, &'a str, u64)>) -> Option<String> {
    let mut root = Frame { name: space.into(), ..Frame::default() };
    for (role, name, bytes) in parts.filter(|(.., bytes)| *bytes > 0) {
        let role = role.to_string();
        let mut path = vec![role.as_str()];
        path.extend(name.split('.').filter(|_| name != role));
        root.add(&path, bytes);
    }
    (root.bytes > 0).then(|| {
        let whole = root.bytes;
        root.children.iter_mut().for_each(|child| child.arrange((whole as f64 * MIN_FRACTION) as u64));
        root.children.sort_by_key(|part| std::cmp::Reverse(part.bytes));
        let mut out = String::from("<div class=icicle>");
        root.html(whole, 0, &mut out);
        out.push_str("</div>\n");
        out
    })
}

/// Every memory space that the plan uses, device first.
pub fn html(plan: &MemoryPlan) -> String {
    let of = |space: MemorySpace| {
        let parts = plan.parts.iter().filter(move |part| part.r#where == space);
        html_of(&space.to_string(), parts.map(|part| (part.role, part.name.as_str(), part.bytes)))
    };
    [MemorySpace::Vram, MemorySpace::Ram].into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_add_up_and_small_boxes_are_joined() {
        let mut root = Frame::default();
        for (path, bytes) in [
            (&["act", "b", "0"][..], 600),
            (&["act", "b", "1"], 300),
            (&["act", "c"], 2),
            (&["act", "d"], 1),
            (&["w", "x"], 97),
        ] {
            root.add(path, bytes);
        }
        root.arrange(5);
        assert_eq!(root.bytes, 1000);
        assert_eq!((root.children[0].name.as_str(), root.children[0].bytes), ("act", 903));
        assert_eq!(root.children[1].name, "w.x");
        let names: Vec<&str> = root.children[0].children.iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["b", "2 smaller"]);
        assert_eq!(root.children[0].children[0].children[0].bytes, 600);
    }

    #[test]
    fn a_plan_has_a_box_for_each_role() {
        let html = html(&crate::report::fixtures::plan());
        assert!(html.contains("activations: 132 MiB, 62.3 %") && html.contains("conv1: 100 MiB"), "{html}");
        assert!(!html.contains("vram"));
    }
}
